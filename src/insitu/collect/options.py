"""Options and protocols of the collector, and the state that an earlier process left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from insitu.collect.dispatcher import CollectOptions, Slot
from insitu.collect.pending_group import ResumedGroup
from insitu.types import Group, Rollout, Task

LateGroups = Literal["wait", "skip", "cancel"]
"""What a batch does about a late group.

wait: it waits. skip: it waits, but not for retries after infrastructure failures; those rollouts are missing
from their group. cancel: it takes younger groups, and the late one is dropped at the next version.
"""


class GroupSink(Protocol):
    """Storage for everything that is planned; durable before a call returns."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """Record a draw: its rollouts exist from now on."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """Record that an attempt has got its worker."""

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        """Record a failed attempt; if it was the last, the rollout arrives by `put` too."""

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        """Record a cancelled attempt; `rollout` contains the tokens sampled so far.

        `reason`: its group is stale, it missed its deadline, or the run ended before it (unused). If it was
        the last attempt, the rollout arrives by `discard` too.
        """

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        """Record why rollouts are not trained: stale, degenerate, truncated, deadline or infra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOptions:
    """Bounds on staleness and on the duration of a group."""

    members: CollectOptions
    groups: int
    """P: groups per batch."""
    staleness: int
    """S: versions that a trained token may be behind the trainer."""
    total: int
    """Groups to deliver in the whole run, including those of earlier processes."""
    lookahead: float = 0.3
    """Share of the places, from the oldest group on, that a batch may choose from."""
    late_groups: LateGroups = "wait"
    """What happens to a group that is not ready in the last batch that could train it."""
    group_min: int = 2
    """late_groups = skip: least number of graded rollouts in a group."""
    deadline_s: float = math.inf
    """Seconds from the start of an attempt until its agent is stopped and graded, if less than wall_s."""
    grace_s: float = 300.0
    """Further seconds for sealing and grading; after that the group continues without the rollout."""
    replace_degenerate: int = 0
    """Rejected groups that are replaced per version; further ones are delivered as they are."""
    stall_timeout_s: float = 3600.0
    """Seconds without progress while the trainer waits after which the run ends; at least twice wall_s."""


TaskSupply = Callable[[int], Task]
"""The task of a draw, counted from 0."""
RejectReason = Callable[[Group], str]
"""Why the trainer cannot use a decided group (degenerate, truncated, infra, deadline), or empty."""


def accept_all(group: Group) -> str:
    """Accept every group."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """State left by an earlier process."""

    draws: Sequence[ResumedGroup] = ()
    """Neither trained nor discarded, in order."""
    next_draw: int = 0
    delivered: int = 0
    """Groups trained in committed steps."""
