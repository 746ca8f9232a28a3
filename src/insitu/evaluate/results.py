"""Storage of an evaluation's rollouts, and the check that a resumed run has the same tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from insitu.attempt import NOTHING_SAMPLED
from insitu.collect.options import Phase, Slot
from insitu.errors import RecordError
from insitu.storage.store import Store
from insitu.storage.summaries import RolloutSummary
from insitu.storage.wall_clock import WALL_S, WallClock
from insitu.tasks.base import same_task
from insitu.types import Rollout, Status, Task

PHASE: Phase = "rollout"
STEP = 0
CLOCK_S = 5.0
"""Interval at which the elapsed time is stored; at most that much is lost in a kill."""


class ResultSink:
    """Implements collect.options.ResumableSink over the run's store."""

    def __init__(self, store: Store, clock: WallClock, note: Callable[[str], None]) -> None:
        self._store, self._clock, self._note = store, clock, note
        self._noted_s = time.monotonic()

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """Do nothing: rollouts that are not stored are repeated."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """See `plan`."""

    def put(self, slot: Slot, rollout: Rollout) -> None:
        self._store.put_rollout(slot.phase, slot.step, slot.group, slot.slot, rollout)
        if time.monotonic() - self._noted_s >= CLOCK_S:
            self._store.set_meta(WALL_S, self._clock.meta()[WALL_S])
            self._noted_s = time.monotonic()

    def rescored(self, rollout: Rollout) -> None:
        self._store.put_reward(rollout)

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self._store.put_attempt(rollout)
        self._note(
            f"{rollout.task_id} {slot.slot}: attempt {rollout.attempt} could not be graded: {rollout.error}"
        )

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        """See `plan`."""

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        """See `plan`."""

    def held(self, phase: Phase, step: int) -> Mapping[str, Rollout]:
        """Return the stored rollouts except infrastructure failures, which are repeated."""
        stored = self._store.outcomes(phase, step)
        return {o.rollout_id: _decided(o) for o in stored if o.status is not Status.INFRA_FAILED}

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        return self._store.tried(f"{phase}/{step:05d}/")


def _decided(outline: RolloutSummary) -> Rollout:
    """Return a Rollout with the fields that the collector reads."""
    return Rollout(
        id=outline.rollout_id,
        task_id=outline.task_id,
        category=outline.category,
        status=outline.status,
        reward=outline.reward,
        trajectory=NOTHING_SAMPLED,
        verdict=None,
        changed={},
        deleted=(),
        timings=outline.timings,
        attempt=outline.attempt,
        error=outline.error,
    )


def check_same_tasks(store: Store, tasks: Sequence[Task], per_task: int) -> None:
    """Raise RecordError or TaskError when the tasks differ from those of the stored rollouts."""
    for stored in store.outcomes(PHASE, STEP):
        if stored.group >= len(tasks) or stored.slot >= per_task:
            raise RecordError(f"{stored.rollout_id} is stored but is not a rollout of these tasks")
        task = tasks[stored.group]
        same_task(stored.rollout_id, task, stored.task_id, stored.task_hash)


def count_missing(store: Store, tasks: Sequence[Task], per_task: int) -> int:
    """Return how many rollouts are still undecided."""
    decided = sum(stored.status is not Status.INFRA_FAILED for stored in store.outcomes(PHASE, STEP))
    return len(tasks) * per_task - decided
