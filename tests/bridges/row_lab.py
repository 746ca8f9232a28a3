"""Small rollouts and groups for tests of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from insitu.types import STEP, Group, Ledger, Rollout, Segment, Status, Timings, Trajectory, Turn
from insitu_train.plan.step import PlanConfig

PLAN = PlanConfig()


def segment(name: str, index: int, *, trained: int = 3, version: int = 4) -> Segment:
    ids = np.arange(5 + trained, dtype=np.int32) + 100 * index
    mask = np.zeros(len(ids), np.bool_)
    mask[4 : 4 + trained] = True  # one token after the last trained one
    return Segment(
        rollout_id=name,
        index=index,
        kind="sampled",
        label="final",
        ids=ids,
        mask=mask,
        logprobs=np.where(mask, -0.25, 0).astype(np.float32),
        versions=np.where(mask, version, 0).astype(np.int32),
    )


def rollout(
    name: str, reward: float | None, segments: int = 1, *, status: Status = Status.OK, edited: int = 0
) -> Rollout:
    rows = tuple(segment(name, index) for index in range(segments))
    trained = 3 * segments
    ledger = Ledger(captured=trained + edited, trained=trained, excluded={"edited": edited} if edited else {})
    return Rollout(
        id=name,
        task_id="t",
        category="",
        status=status,
        reward=reward,
        trajectory=Trajectory(segments=rows, turns=(), ledger=ledger),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
    )


def stepped(one: Rollout) -> Rollout:
    """The rollout with a turn in a second step of its task."""
    nothing = np.zeros(1, np.int32)
    turn = Turn(
        index=0, parent=-1, context_ids=nothing, ids=nothing, logprobs=None, finish="stop", version_runs=(),
        hints=(("label", f"{STEP}2"),),
    )  # fmt: skip
    return replace(one, trajectory=replace(one.trajectory, turns=(turn,)))


def groups() -> list[Group]:
    """Trained, at the mean, ungraded and failed rollouts; a degenerate group."""
    first = (
        rollout("train/1/0/0", 1.0, 2, edited=2),
        rollout("train/1/0/1", 0.0),
        rollout("train/1/0/2", 0.5),
        rollout("train/1/0/3", None),
        rollout("train/1/0/4", None, status=Status.INFRA_FAILED),
    )
    same = (rollout("train/1/1/0", 1.0), rollout("train/1/1/1", 1.0))
    return [
        Group(id="train/1/0", task_id="t", rollouts=first),
        Group(id="train/1/1", task_id="t", rollouts=same),
    ]
