"""A pending group: one draw of a task, its members, and the oldest version among its trained tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from insitu.collect.options import Slot
from insitu.collect.staleness import oldest_version
from insitu.tasks.base import same_task
from insitu.types import Group, Rollout, Status, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedGroup:
    """A draw of an earlier process that is neither trained nor discarded."""

    number: int
    task: Task
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """Decided members by rollout id; the others are run."""
    given_up: frozenset[str] = frozenset()
    """Members discarded at the group's deadline."""
    tried: Mapping[str, int] = field(default_factory=dict)
    """Rollout id -> number of its last known attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """State left by an earlier process."""

    draws: Sequence[ResumedGroup] = ()
    """Neither trained nor discarded, in order."""
    next_draw: int = 0
    delivered: int = 0
    """Groups trained in committed steps."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRollout:
    """One slot of a pending group."""

    slot: Slot
    tried: int = 0
    """Number of the last attempt."""
    rollout: Rollout | None = None
    """Set when decided."""
    version: int | None = None
    """Oldest possible version of a trained token: the version at the start, later that of its tokens."""
    running_since: float | None = None
    spent_s: float = 0.0
    """Rollout-seconds of the attempt that decided it."""

    failed: bool = False
    """An attempt failed in this process because of the infrastructure."""
    deciding: asyncio.Task[None] | None = None
    skipped: bool = False
    """It is being cancelled because its group continues without it."""
    given_up: bool = False
    """Its group continued without it."""

    @property
    def undecided(self) -> bool:
        return self.rollout is None and not self.given_up

    def begin(self, now: float, version: int) -> None:
        self.running_since, self.version = now, version

    def end(self, now: float) -> float:
        """End the attempt; return its rollout-seconds."""
        seconds = 0.0 if self.running_since is None else now - self.running_since
        self.running_since, self.version = None, None
        return seconds

    def decide(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.version = None if rollout.status is Status.INFRA_FAILED else oldest_version(rollout)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingGroup:
    """A drawn group until it is delivered or dropped; owned by the collector."""

    number: int
    """Number of the draw, from 0; defines the order."""
    task: Task
    members: Sequence[PendingRollout]
    version: int
    """Current version when it was drawn."""
    filling: asyncio.Task[None] | None = None
    drop_reason: str = ""
    """Why it is being cancelled."""
    group: Group | None = None
    """Set when ready."""
    oldest: int | None = None
    """Oldest possible version of a trained token; None while none was sampled. See `update_oldest`."""

    @property
    def id(self) -> str:
        return self.members[0].slot.rollout_id.rsplit("/", 1)[0]

    def update_oldest(self) -> None:
        """Update `oldest` after the version of a member has changed."""
        # Stored: whenever a group is ready it is compared with all open ones.
        found = [m.version for m in self.members if m.version is not None]
        self.oldest = min(found, default=None)

    @property
    def decided(self) -> Sequence[Rollout]:
        return [m.rollout for m in self.members if m.rollout is not None]

    @property
    def spent_s(self) -> float:
        return sum(m.spent_s for m in self.members)

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the rollouts that were not given up."""
        return [m.slot.rollout_id for m in self.members if not m.given_up]

    def skip_retries(self, least: int) -> None:
        """Stop retries if nothing else of the group is undecided and at least `least` members are graded."""
        undecided = [m for m in self.members if m.undecided]
        graded = sum(rollout.reward is not None for rollout in self.decided)
        if graded < least or not all(m.failed for m in undecided):
            return
        for member in undecided:
            if member.deciding is not None and not member.skipped:
                member.skipped = True
                member.deciding.cancel()

    def bounded(self, deadline_s: float) -> Task:
        """Return the task with the deadline, if any, as its wall limit; the agent is graded then."""
        # A retry has as much time as the first attempt, or it would be graded for a failure of the host.
        wall_s = self.wall_s(deadline_s)
        if wall_s == self.task.limits.wall_s:
            return self.task
        return replace(self.task, limits=self.task.limits.changed(wall_s=wall_s))

    def wall_s(self, deadline_s: float) -> float:
        """Return the wall limit of the task with the deadline, if any."""
        wall_s = self.task.limits.wall_s
        return deadline_s if 0 < deadline_s < wall_s else wall_s


def new_pending_group(
    number: int, task: Task, slots: Sequence[Slot], version: int, resumed: ResumedGroup | None = None
) -> PendingGroup:
    """Return a pending group; members of `resumed` that are decided stay decided.

    Raises TaskError when one of these had another task.
    """
    members = [PendingRollout(slot=slot) for slot in slots]
    if resumed is not None:
        for member in members:
            member.tried = resumed.tried.get(member.slot.rollout_id, 0)
            member.given_up = member.slot.rollout_id in resumed.given_up
            rollout = resumed.rollouts.get(member.slot.rollout_id)
            if rollout is not None:
                named = rollout.verdict.task_hash if rollout.verdict else ""
                same_task(rollout.id, task, rollout.task_id, named)
                member.decide(rollout)
    pending = PendingGroup(number=number, task=task, members=members, version=version)
    pending.update_oldest()
    return pending


def describe_pending(groups: Collection[PendingGroup]) -> str:
    """Return one line on the state of the groups."""
    members = [m for group in groups for m in group.members]
    running = sum(m.running_since is not None for m in members)
    queued = sum(m.undecided and m.running_since is None for m in members)
    ready = sum(group.group is not None for group in groups)
    return f"{running} rollouts run, {queued} wait for a worker, {ready} of {len(groups)} groups are ready"
