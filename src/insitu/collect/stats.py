"""What the collector did since the last batch, and what that cost in rollout-seconds.

A rollout-second is useful when its rollout is handed to the trainer, wasted when its try failed, was
cancelled, or belonged to a group that was dropped. Written by collector.py, read by the training loop.
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
    """What the trainer gets, and the account since it got the one before."""

    groups: Sequence[Group] = field(repr=False)
    version: int
    """Of the trainer, as of now."""
    staleness: Sequence[int]
    """Of each rollout with trained tokens: version - the oldest version among them."""
    waited_s: float
    """The trainer's, for this batch."""
    useful_s: float
    """Rollout-seconds of the rollouts in it."""
    wasted_s: float
    """Rollout-seconds of tries and groups that came to nothing."""
    dropped: Mapping[str, int]
    """Groups by reason."""
    drawn: int
    late: int
    """Rollouts given up at the deadline of their group."""
    running: int
    """Groups under way."""
    ready: int
    """Groups that wait for a later batch."""

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

    @property
    def staleness_mean(self) -> float:
        return sum(self.staleness) / len(self.staleness) if self.staleness else 0.0

    @property
    def wasted(self) -> float:
        """Share of the rollout-seconds."""
        total = self.useful_s + self.wasted_s
        return self.wasted_s / total if total else 0.0


@dataclass(slots=True)
class CollectStats:
    """Counts since the last batch."""

    drawn: int = 0
    late: int = 0
    wasted_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def lost(self, seconds: float) -> None:
        """A try came to nothing."""
        self.wasted_s += seconds

    def dropped(self, draft: PendingGroup, reason: str) -> None:
        self.wasted_s += draft.spent_s
        self.reasons[reason] += 1

    def batch(
        self, taken: Sequence[PendingGroup], version: int, *, waited_s: float, running: int, ready: int
    ) -> CollectedBatch:
        """Close the account; counting begins anew."""
        groups = [draft.group for draft in taken if draft.group is not None]
        oldest = [oldest_version(rollout) for group in groups for rollout in group.rollouts]
        made = CollectedBatch(
            groups=groups,
            version=version,
            staleness=[version - v for v in oldest if v is not None],
            waited_s=waited_s,
            useful_s=sum(draft.spent_s for draft in taken),
            wasted_s=self.wasted_s,
            dropped=dict(self.reasons),
            drawn=self.drawn,
            late=self.late,
            running=running,
            ready=ready,
        )
        self.drawn, self.late, self.wasted_s = 0, 0, 0.0
        self.reasons.clear()
        return made
