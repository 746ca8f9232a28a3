"""Where decided rollouts of an evaluation go, and whether what is held still belongs to these tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from insitu.attempt import NOTHING_SAMPLED
from insitu.collect.dispatcher import Phase, Slot
from insitu.errors import RecordError
from insitu.storage.store import Store
from insitu.storage.summaries import Outline
from insitu.training.loop import WALL_S, WallClock
from insitu.types import Rollout, Status, Task

PHASE: Phase = "rollout"
STEP = 0
CLOCK_S = 5.0
"""Seconds between two notes of how long the run has taken; a kill takes that much with it."""


class ResultSink:
    """Implements collect.dispatcher.Sink on the run's store."""

    def __init__(self, store: Store, clock: WallClock, note: Callable[[str], None]) -> None:
        self._store, self._clock, self._note = store, clock, note
        self._noted_s = time.monotonic()

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """Nothing of this kind is trained: what is not stored is made again."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """See `plan`."""

    def put(self, slot: Slot, rollout: Rollout) -> None:
        self._store.put_rollout(slot.phase, slot.step, slot.group, slot.slot, rollout)
        if time.monotonic() - self._noted_s >= CLOCK_S:
            self._store.set_meta(WALL_S, self._clock.meta()[WALL_S])
            self._noted_s = time.monotonic()

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self._store.put_attempt(rollout)
        self._note(
            f"{rollout.task_id} {slot.slot}: try {rollout.attempt} could not be graded: {rollout.error}"
        )

    def held(self, phase: Phase, step: int) -> Mapping[str, Rollout]:
        """What only failed of the infrastructure is run again."""
        ended = self._store.outcomes(phase, step)
        return {o.rollout_id: _decided(o) for o in ended if o.status is not Status.INFRA_FAILED}

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        return self._store.tried(f"{phase}/{step:05d}/")


def _decided(outline: Outline) -> Rollout:
    """As much of it as the collector looks at."""
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
    """Raises RecordError when what is stored was not rolled out on these tasks: a data set has changed."""
    for held in store.outcomes(PHASE, STEP):
        if held.group >= len(tasks) or held.slot >= per_task:
            raise RecordError(f"{held.rollout_id} is stored, and these tasks have no such place")
        task = tasks[held.group]
        if held.task_id != task.id or held.task_hash not in ("", task.content_hash):
            raise RecordError(
                f"{held.rollout_id} was rolled out on {held.task_id}, and that place is now {task.id} with"
                f" another content: the data set is not the one that the run began with"
            )


def open_places(store: Store, tasks: Sequence[Task], per_task: int) -> int:
    """How many rollouts are still to be decided."""
    decided = sum(held.status is not Status.INFRA_FAILED for held in store.outcomes(PHASE, STEP))
    return len(tasks) * per_task - decided
