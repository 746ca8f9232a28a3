"""The collectors' sink in a training run: everything goes to the run's store, and tries into the account of
masks. Callers: the dispatcher (one step at a time) and the collector (ahead of the trainer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from whet.capture.ledger import reassign
from whet.collect.dispatcher import Phase, Slot
from whet.collect.masking import MaskRate
from whet.record.states import Reason
from whet.record.store import Store
from whet.types import Rollout, Status


class StoreSink:
    """Implements collect.dispatcher.Sink and collect.collector.GroupSink."""

    def __init__(self, store: Store, masks: MaskRate) -> None:
        self._store, self._masks = store, masks

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        self._store.plan(slots, task_id, version)

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        self._store.start(rollout_id, attempt, version)

    def put(self, slot: Slot, rollout: Rollout) -> None:
        self._masks.decided(rollout)
        self._store.put_rollout(slot.phase, slot.step, slot.group, slot.slot, rollout)

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self._masks.failed(rollout)
        self._store.put_attempt(rollout)

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        """Nothing failed, so it is no masked try; its tokens are accounted for under the reason."""
        ledger = reassign(rollout.trajectory.ledger, reason)
        trajectory = replace(rollout.trajectory, ledger=ledger)
        self._store.put_attempt(replace(rollout, trajectory=trajectory, error=f"cancelled: {reason}"))

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        self._store.discard(rollout_ids, cast(Reason, reason))

    def held(self, phase: Phase, step: int) -> Mapping[str, Rollout]:
        again = self._store.still_open(phase, step)
        stored = self._store.rollouts(phase, step)
        return {r.id: r for r in stored if not (again and r.status is Status.INFRA_FAILED)}

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        return self._store.tried(f"{phase}/{step:05d}/")
