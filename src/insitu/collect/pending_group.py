"""A group in the making: one draw of a task, its members, and how old its oldest trained token may be."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from insitu.collect.dispatcher import Slot
from insitu.collect.staleness import oldest_version
from insitu.types import Group, Rollout, Status, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedGroup:
    """A draw of an earlier process that is neither trained nor discarded."""

    number: int
    task: Task
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """Decided members by rollout id; the rest is run."""
    given_up: frozenset[str] = frozenset()
    """Members that were discarded when the group's time was over."""
    tried: Mapping[str, int] = field(default_factory=dict)
    """Rollout id -> number of the last try known."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRollout:
    """One slot of a draft."""

    slot: Slot
    tried: int = 0
    """Number of the last try."""
    rollout: Rollout | None = None
    """Once decided."""
    version: int | None = None
    """Oldest version that a trained token may have: of the start while it runs (its first call comes seconds
    later; a try that samples under a newer version only is rare and not waited for), then of its tokens."""
    running_since: float | None = None
    spent_s: float = 0.0
    """Rollout-seconds of the try that decided it."""

    failed: bool = False
    """The infrastructure has failed a try of it in this process."""
    deciding: asyncio.Task[None] | None = None
    left: bool = False
    """It is being cancelled, since its group goes on without it."""
    given_up: bool = False
    """Its group went on without it."""

    @property
    def waited_for(self) -> bool:
        return self.rollout is None and not self.given_up

    def begin(self, now: float, version: int) -> None:
        self.running_since, self.version = now, version

    def end(self, now: float) -> float:
        """The try is over; returns its rollout-seconds."""
        seconds = 0.0 if self.running_since is None else now - self.running_since
        self.running_since, self.version = None, None
        return seconds

    def decide(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.version = None if rollout.status is Status.INFRA_FAILED else oldest_version(rollout)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingGroup:
    """See the module. Owned by the collector."""

    number: int
    """Of the draw, from 0; its place in the order."""
    task: Task
    members: Sequence[PendingRollout]
    version: int
    """In force when it was drawn."""
    filling: asyncio.Task[None] | None = None
    doom: str = ""
    """Why it is being cancelled."""
    group: Group | None = None
    """Once ready."""

    @property
    def id(self) -> str:
        return self.members[0].slot.rollout_id.rsplit("/", 1)[0]

    @property
    def oldest(self) -> int | None:
        """Oldest version that a trained token of it may have; None while none was sampled."""
        found = [m.version for m in self.members if m.version is not None]
        return min(found, default=None)

    @property
    def decided(self) -> Sequence[Rollout]:
        return [m.rollout for m in self.members if m.rollout is not None]

    @property
    def spent_s(self) -> float:
        return sum(m.spent_s for m in self.members)

    @property
    def ids(self) -> Sequence[str]:
        """Rollouts that nobody gave up."""
        return [m.slot.rollout_id for m in self.members if not m.given_up]

    def skip_retries(self, least: int) -> None:
        """Stop further tries when nothing else of the group is undecided and `least` members are graded."""
        waited_for = [m for m in self.members if m.waited_for]
        graded = sum(rollout.reward is not None for rollout in self.decided)
        if graded < least or not all(m.failed for m in waited_for):
            return
        for member in waited_for:
            if member.deciding is not None and not member.left:
                member.left = True
                member.deciding.cancel()

    def bounded(self, deadline_s: float) -> Task:
        """The task as every try gets it: after the deadline the agent is stopped and what it has done is
        graded. A further try has as much time as the first; with what a lost sandbox has left it would be
        graded for the infrastructure's doing."""
        limits = self.task.limits
        if deadline_s >= limits.wall_s:
            return self.task
        return replace(self.task, limits=replace(limits, wall_s=deadline_s))


def new_pending_group(
    number: int, task: Task, slots: Sequence[Slot], version: int, held: ResumedGroup | None = None
) -> PendingGroup:
    """A draft whose held members are decided already."""
    members = [PendingRollout(slot=slot) for slot in slots]
    if held is not None:
        for member in members:
            member.tried = held.tried.get(member.slot.rollout_id, 0)
            member.given_up = member.slot.rollout_id in held.given_up
            rollout = held.rollouts.get(member.slot.rollout_id)
            if rollout is not None:
                member.decide(rollout)
    return PendingGroup(number=number, task=task, members=members, version=version)


def describe_pending(drafts: Collection[PendingGroup]) -> str:
    """Where groups are, in one line."""
    members = [m for draft in drafts for m in draft.members]
    running = sum(m.running_since is not None for m in members)
    queued = sum(m.waited_for and m.running_since is None for m in members)
    ready = sum(draft.group is not None for draft in drafts)
    return f"{running} rollouts run, {queued} wait for a worker, {ready} of {len(drafts)} groups are ready"
