"""Groups of rollouts made of recorded sessions of real agents: sub-agents, compaction, forks, retries."""

from __future__ import annotations

from dataclasses import replace

from recordings_lab import FOLDER, read, replay

from insitu.chat.template import TemplateRenderer
from insitu.types import Group, Rollout, Status, Timings, Trajectory
from insitu_lab.open_renderer import Splitter

AGENTS = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.jsonl.xz"))


async def played_group(agent: str, renderer: TemplateRenderer, splitter: Splitter) -> Group:
    """Replay a recording and return a group: solved, not solved, at the mean, not graded."""
    made = await replay(read(FOLDER / f"{agent}.jsonl.xz"), renderer, splitter)
    rollouts = tuple(
        _rollout(made.trajectory, slot, reward) for slot, reward in enumerate((1.0, 0.0, 0.5, None))
    )
    return Group(id="train/00001/000", task_id=agent, rollouts=rollouts)


def _rollout(trajectory: Trajectory, slot: int, reward: float | None) -> Rollout:
    name = f"train/00001/000/{slot:02d}"
    return Rollout(
        id=name,
        task_id="t",
        category="",
        status=Status.OK,
        reward=reward,
        trajectory=replace(
            trajectory, segments=tuple(replace(s, rollout_id=name) for s in trajectory.segments)
        ),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(agent_s=2.0, engine_s=0.5, grade_s=0.25),
    )
