"""What a collector is given: where its rollouts end, how far ahead it may be, which tasks come, and what an
earlier process left. Callers: collector.py, and whoever opens one (training/batch_source.py,
`benchmarks/async_.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from insitu.collect.dispatcher import CollectOptions, Slot
from insitu.collect.pending_group import ResumedGroup
from insitu.types import Group, Rollout, Task

LateGroups = Literal["wait", "skip", "cancel"]
"""The batch waits; it waits, but not for further tries of rollouts that the infrastructure failed, which are
missing in their group then; or it takes younger groups, and the slow one is lost at the next version."""


class GroupSink(Protocol):
    """Where everything that is planned ends; durable before a call returns."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """A draw: its rollouts exist from now on."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """A try has got its worker."""

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        """One try failed. If it was the last, the rollout arrives by `put` too."""

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        """One try was cancelled, because its group is stale, it missed its deadline, or the run ends before
        it (unused); but for the last, the rollout arrives by `discard`. `rollout` holds what had been
        sampled."""

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        """None of them will be trained: stale, degenerate, truncated, deadline or infra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOptions:
    """How far ahead, and how long a group may take."""

    members: CollectOptions
    groups: int
    """P, of one batch."""
    staleness: int
    """S: versions that a trained token may be behind the trainer."""
    total: int
    """Groups to deliver until the run ends, those of earlier processes included."""
    lookahead: float = 0.3
    """Share of the places that a batch may reach over, from the oldest group on."""
    late_groups: LateGroups = "wait"
    """What becomes of a group that is not ready in the last batch that could train it."""
    group_min: int = 2
    """leave: graded rollouts that a group must have."""
    deadline_s: float = math.inf
    """From the start of a try, if its task's wall limit is not shorter: then its agent is stopped and what it
    has done is graded."""
    grace_s: float = 300.0
    """From there, for sealing and grading: then the group goes on without who is undecided."""
    replace_degenerate: int = 0
    """Groups of no use that are replaced per version; further ones are handed over as they are."""
    stall_timeout_s: float = 3600.0
    """Without a rollout begun or decided while the trainer waits: then the run ends. A running task's own
    wall limit, twice, counts if it is longer."""


TaskSupply = Callable[[int], Task]
"""The task of a draw, counted from 0."""
RejectReason = Callable[[Group], str]
"""Why a decided group is of no use to the trainer (degenerate, truncated, infra, deadline), or empty."""


def accept_all(group: Group) -> str:
    """Every group is handed over."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What an earlier process left."""

    draws: Sequence[ResumedGroup] = ()
    """Neither trained nor discarded, in order."""
    next_draw: int = 0
    delivered: int = 0
    """Groups that committed steps took."""
