"""The trainer's state after the last committed step: a checkpoint, and the steps to train again after it.

A step is committed by one transaction of the store, before its checkpoint is written. Without one, the same
plan is made from the stored rollouts and trained again, on a CPU with the same bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from insitu.errors import RecordError
from insitu.storage.run_dir import RunDir
from insitu.storage.store import StepRecord, Store
from insitu.types import Group, Rollout
from insitu_train.phases import is_heldout
from insitu_train.plan.digest import is_plan
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A committed step without a checkpoint."""

    step: int
    plan: Callable[[], StepPlan]
    """Makes its plan from the stored rollouts."""
    version: int
    """Policy version after it."""
    weights: str
    """Digest of the weights after it; empty = unknown."""


Committed = tuple[Path | None, Sequence[CommittedStep]]
"""The newest checkpoint, None before the first, and the updates after it in order."""


def committed(run: RunDir, store: Store, config: PlanConfig) -> Committed:
    """Return what makes the trainer's state after the last committed step."""
    steps = store.steps()
    last = steps[-1].step if steps else 0
    at = max((step for step in written_steps(run.checkpoints) if step <= last), default=0)
    after = (record for record in steps if record.step > at and not record.metrics["skipped"])
    folder = checkpoint_folder(run, at) if at else None
    return folder, [
        CommittedStep(
            step=record.step,
            plan=partial(_planned_again, store, record, config),
            version=record.metrics["version"],
            # a training service gives no digest
            weights="" if run.config.policy.kind == "tinker" else record.metrics["weights"],
        )
        for record in after
    ]


def _planned_again(store: Store, record: StepRecord, config: PlanConfig) -> StepPlan:
    plan = plan_step(stored_groups(store, record.step), config)
    if not is_plan(plan, record.plan_hash):
        raise RecordError(
            f"step {record.step} cannot be trained again: its stored rollouts give another plan than the"
            " one that was trained"
        )
    return plan


def stored_groups(store: Store, step: int) -> Sequence[Group]:
    """Return the groups of one training step as collected."""
    rollouts = store.step_rollouts(step)

    def group_of(rollout: Rollout) -> str:
        return rollout.id.rsplit("/", 1)[0]

    return [
        Group(id=name, task_id=held[0].task_id, rollouts=tuple(held))
        for name, held in ((name, list(members)) for name, members in groupby(rollouts, key=group_of))
    ]


def checkpoint_folder(run: RunDir, step: int) -> Path:
    return run.checkpoints / f"step-{step:05d}"


def written_steps(checkpoints: Path) -> list[int]:
    """Return the steps whose checkpoints are complete on disk, in order; a copy of another name is none."""
    names = (path.name.removeprefix("step-") for path in checkpoints.glob("step-[0-9]*"))
    return sorted(int(name) for name in names if name.isdecimal())


def heldout_scores(store: Store) -> dict[int, float]:
    """Map steps, in order, to the mean reward on held-out tasks after them; 0 = before training."""
    # After a run that stopped early its last step has two: the one that ended it counts, also on resume.
    places = sorted(place for place in store.phases() if is_heldout(place[0]))
    scores = {step: store.scores(phase, step)[""] for phase, step in places}
    return {step: scores[step].reward_mean for step in sorted(scores) if scores[step].total}


def best_step(store: Store, among: Sequence[int]) -> int | None:
    """Return the step with the highest mean reward on held-out tasks, the later of equal ones."""
    scores = {step: score for step, score in heldout_scores(store).items() if step in among and step}
    return max(scores, key=lambda step: (scores[step], step), default=None)


def prune(folder: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and that of the step `best`."""
    for old in written_steps(folder)[:-keep]:
        if old != best:
            shutil.rmtree(folder / f"step-{old:05d}", ignore_errors=True)


def check_steps(run: RunDir, store: Store) -> None:
    """Raise RecordError when there is a checkpoint of a step that the store does not have."""
    last = store.last_step()
    known = 0 if last is None else last.step
    written = written_steps(run.checkpoints)
    if max(written, default=0) > known:
        raise RecordError(
            f"{run.path / 'run.sqlite'} has {known} steps, but checkpoints reach step {written[-1]}:"
            " restore the matching store, or start a new run"
        )
