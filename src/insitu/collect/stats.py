"""Counters of the collector since the last batch, and its cost in rollout-seconds.

A rollout-second is useful if its rollout is delivered to the trainer, wasted if its attempt failed, was
cancelled, or belonged to a dropped group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from insitu.collect.pending_group import PendingGroup
from insitu.collect.staleness import oldest_version
from insitu.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedBatch:
    """A batch for the trainer, with the counters since the previous one."""

    groups: Sequence[Group] = field(repr=False)
    version: int
    """Current version of the trainer."""
    staleness: Sequence[int]
    """Per rollout with trained tokens: version - oldest version among them."""
    waited_s: float
    """Seconds the trainer waited for this batch."""
    useful_s: float
    """Rollout-seconds of the rollouts in it."""
    wasted_s: float
    """Rollout-seconds of failed attempts and dropped groups."""
    dropped: Mapping[str, int]
    """Groups by reason."""
    drawn: int
    late: int
    """Rollouts given up at the deadline of their group."""
    running: int
    """Unfinished groups."""
    ready: int
    """Finished groups waiting for a later batch."""

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

    @property
    def staleness_mean(self) -> float:
        return sum(self.staleness) / len(self.staleness) if self.staleness else 0.0

    @property
    def wasted(self) -> float:
        """Wasted share of the rollout-seconds."""
        total = self.useful_s + self.wasted_s
        return self.wasted_s / total if total else 0.0


@dataclass(slots=True)
class CollectStats:
    """Counters since the last batch."""

    drawn: int = 0
    late: int = 0
    wasted_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def lost(self, seconds: float) -> None:
        """Count a failed or cancelled attempt."""
        self.wasted_s += seconds

    def dropped(self, group: PendingGroup, reason: str) -> None:
        self.wasted_s += group.spent_s
        self.reasons[reason] += 1

    def batch(
        self, taken: Sequence[PendingGroup], version: int, *, waited_s: float, running: int, ready: int
    ) -> CollectedBatch:
        """Return the batch with its counters, and reset them."""
        groups = [pending.group for pending in taken if pending.group is not None]
        oldest = [oldest_version(rollout) for group in groups for rollout in group.rollouts]
        batch = CollectedBatch(
            groups=groups,
            version=version,
            staleness=[version - v for v in oldest if v is not None],
            waited_s=waited_s,
            useful_s=sum(pending.spent_s for pending in taken),
            wasted_s=self.wasted_s,
            dropped=dict(self.reasons),
            drawn=self.drawn,
            late=self.late,
            running=running,
            ready=ready,
        )
        self.drawn, self.late, self.wasted_s = 0, 0, 0.0
        self.reasons.clear()
        return batch
