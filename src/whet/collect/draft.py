"""A group in the making: one draw of a task, its members, and how old its oldest trained token may be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from whet.collect.dispatcher import Slot
from whet.collect.freshness import oldest_version
from whet.types import Group, Rollout, Status, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDraw:
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
class Member:
    """One slot of a draft."""

    slot: Slot
    tried: int = 0
    """Number of the last try."""
    rollout: Rollout | None = None
    """Once decided."""
    version: int | None = None
    """Oldest version that a trained token may have: of the start while it runs, then of its tokens."""
    begun_at: float | None = None
    """When its first try got a worker."""
    running_since: float | None = None
    spent_s: float = 0.0
    """Rollout-seconds of the try that decided it."""

    given_up: bool = False
    """Its group went on without it."""

    @property
    def waited_for(self) -> bool:
        return self.rollout is None and not self.given_up

    def begin(self, now: float, version: int) -> None:
        self.begun_at = now if self.begun_at is None else self.begun_at
        self.running_since, self.version = now, version

    def end(self, now: float) -> float:
        """The try is over; returns its rollout-seconds."""
        seconds = 0.0 if self.running_since is None else now - self.running_since
        self.running_since, self.version = None, None
        return seconds

    def left_s(self, now: float, deadline_s: float) -> float:
        """Of its time, all tries together."""
        return deadline_s if self.begun_at is None else deadline_s - (now - self.begun_at)

    def decide(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.version = None if rollout.status is Status.INFRA_FAILED else oldest_version(rollout)


@dataclass(slots=True, eq=False, kw_only=True)
class Draft:
    """See the module. Owned by the collector."""

    number: int
    """Of the draw, from 0; its place in the order."""
    task: Task
    members: Sequence[Member]
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
    def all_begun_at(self) -> float | None:
        """When the last member first got a worker; None while one waits for it."""
        begun = [m.begun_at for m in self.members if m.waited_for or m.begun_at is not None]
        known = [at for at in begun if at is not None]
        return max(known) if known and len(known) == len(begun) else None

    @property
    def ids(self) -> Sequence[str]:
        """Rollouts that nobody gave up."""
        return [m.slot.rollout_id for m in self.members if not m.given_up]

    def give_up(self) -> Sequence[str]:
        """Go on without who is undecided; returns their ids."""
        late = [m for m in self.members if m.waited_for]
        for member in late:
            member.given_up = True
        return [m.slot.rollout_id for m in late]

    def bounded(self, member: Member, now: float, deadline_s: float) -> Task:
        """The task with what is left of the member's time: when it is over the agent is stopped and what it
        has done is graded."""
        limits = self.task.limits
        if member.left_s(now, deadline_s) >= limits.wall_s:
            return self.task
        return replace(self.task, limits=replace(limits, wall_s=member.left_s(now, deadline_s)))


def new_draft(
    number: int, task: Task, slots: Sequence[Slot], version: int, held: HeldDraw | None = None
) -> Draft:
    """A draft whose held members are decided already."""
    members = [Member(slot=slot) for slot in slots]
    if held is not None:
        for member in members:
            member.tried = held.tried.get(member.slot.rollout_id, 0)
            member.given_up = member.slot.rollout_id in held.given_up
            rollout = held.rollouts.get(member.slot.rollout_id)
            if rollout is not None:
                member.decide(rollout)
    return Draft(number=number, task=task, members=members, version=version)
