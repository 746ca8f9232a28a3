"""A sink in memory that refuses a second fate for a rollout and one that was not planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from insitu.collect.options import Slot
from insitu.errors import RecordError
from insitu.types import Rollout


class MemorySink:
    """Implements collect.options.Sink."""

    def __init__(self) -> None:
        self.planned: dict[str, int] = {}
        """Rollout id -> version in force when it was planned."""
        self.started: list[tuple[str, int, int]] = []
        self.rollouts: dict[str, Rollout] = {}
        self.discarded: dict[str, str] = {}
        self.failed: list[tuple[str, int]] = []
        self.lost: Counter[str] = Counter()
        """Tokens of cancelled tries by reason."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        for slot in slots:
            if slot.rollout_id in self.planned:
                raise RecordError(f"{slot.rollout_id} was planned before")
            self.planned[slot.rollout_id] = version

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        self._open(rollout_id)
        self.started.append((rollout_id, attempt, version))

    def put(self, slot: Slot, rollout: Rollout) -> None:
        self._open(rollout.id)
        self.rollouts[rollout.id] = rollout

    def rescored(self, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self._open(rollout.id)
        self.failed.append((rollout.id, rollout.attempt))

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        self._open(rollout.id)
        self.lost[reason] += rollout.trajectory.ledger.captured

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        for rollout_id in rollout_ids:
            if rollout_id not in self.planned or rollout_id in self.discarded:
                raise RecordError(f"{rollout_id} was not planned, or was discarded before")
            self.discarded[rollout_id] = reason

    @property
    def undecided(self) -> set[str]:
        """Planned rollouts without a fate."""
        return set(self.planned) - set(self.rollouts) - set(self.discarded)

    def _open(self, rollout_id: str) -> None:
        if rollout_id not in self.planned or rollout_id in self.rollouts or rollout_id in self.discarded:
            raise RecordError(f"{rollout_id} was not planned, or has its fate already")
