"""What the collector decides, kept in the store of the run: training and evaluations alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, cast

from insitu.capture.ledger import reassign
from insitu.collect.options import Phase, Slot
from insitu.storage.attempts import CANCELLED
from insitu.storage.lifecycle import Reason
from insitu.storage.store import Store
from insitu.types import Rollout, Status


class AttemptObserver(Protocol):
    """Hears of what is stored."""

    def decided(self, rollout: Rollout) -> None: ...

    def failed(self, rollout: Rollout) -> None:
        """Hear of an attempt that failed of the infrastructure; the last one of a slot is decided too."""


class StoreSink:
    """Implements collect.options.ResumableSink."""

    def __init__(self, store: Store, observer: AttemptObserver) -> None:
        self._store, self._observer = store, observer

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        self._store.plan(slots, task_id, version)

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        self._store.start(rollout_id, attempt, version)

    def put(self, slot: Slot, rollout: Rollout) -> None:
        self._observer.decided(rollout)
        self._store.put_rollout(slot.phase, slot.step, slot.group, slot.slot, rollout)
        if slot.phase == "train":
            self._store.close_group(slot.phase, slot.step, slot.group)

    def rescored(self, rollout: Rollout) -> None:
        self._store.put_reward(rollout)

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self._observer.failed(rollout)
        self._store.put_attempt(rollout)

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        """Store a cancelled attempt: not a failure; its tokens are excluded for the reason."""
        ledger = reassign(rollout.trajectory.ledger, reason)
        trajectory = replace(rollout.trajectory, ledger=ledger)
        self._store.put_attempt(replace(rollout, trajectory=trajectory, error=CANCELLED + reason))

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        """Discard rollouts; this may close their groups."""
        self._store.discard(rollout_ids, cast(Reason, reason))
        states = [state for name in rollout_ids if (state := self._store.state(name)) is not None]
        for place in sorted({(s.phase, s.step, s.group) for s in states}):
            self._store.close_group(*place)

    def held(self, phase: Phase, step: int) -> Iterator[Rollout]:
        # One at a time: the caller may keep less of each.
        again = self._store.still_open(phase, step)
        for one in self._store.outcomes(phase, step):
            if not (again and one.status is Status.INFRA_FAILED):
                yield self._store.rollout(one.rollout_id)

    def tried(self, phase: Phase, step: int) -> dict[str, int]:
        return self._store.tried(f"{phase}/{step:05d}/")
