"""The collectors' sink in a training run: stores everything and counts infrastructure failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from insitu.capture.ledger import reassign
from insitu.collect.options import Phase, Slot
from insitu.storage.attempts import CANCELLED
from insitu.storage.lifecycle import Reason
from insitu.storage.store import Store
from insitu.training.alarms.infra import InfraFailureRate
from insitu.types import Rollout, Status


class StoreSink:
    """Implements collect.dispatcher.Sink and collect.collector.GroupSink."""

    def __init__(
        self, store: Store, masks: InfraFailureRate, eval_masks: InfraFailureRate | None = None
    ) -> None:
        """Store into `store`. eval_masks: failure counts of evaluations, which may run concurrently; None =
        masks.
        """
        self._store, self._masks, self._eval_masks = store, masks, eval_masks or masks

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        self._store.plan(slots, task_id, version)

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        self._store.start(rollout_id, attempt, version)

    def put(self, slot: Slot, rollout: Rollout) -> None:
        self._account(slot).decided(rollout)
        self._store.put_rollout(slot.phase, slot.step, slot.group, slot.slot, rollout)
        if slot.phase == "train":
            self._store.close_group(slot.phase, slot.step, slot.group)

    def rescored(self, rollout: Rollout) -> None:
        self._store.put_reward(rollout)

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self._account(slot).failed(rollout)
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

    def held(self, phase: Phase, step: int) -> Mapping[str, Rollout]:
        again = self._store.still_open(phase, step)
        stored = self._store.rollouts(phase, step)
        return {r.id: r for r in stored if not (again and r.status is Status.INFRA_FAILED)}

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        return self._store.tried(f"{phase}/{step:05d}/")

    def _account(self, slot: Slot) -> InfraFailureRate:
        return self._masks if slot.phase == "train" else self._eval_masks
