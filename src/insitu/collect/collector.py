"""Keeps groups under way while the trainer trains, never further ahead than the staleness bound allows.

    supply(n) -> draw -> members run -> group -> ready --window--> next_batch -> trainer
                  ^                       |                                        |
                  +--- room: running + ready + taken <= (S + 1) * P <--- version_published

Every planned rollout reaches the sink once: decided (`put`) or given up (`discard`), and a group that is
dropped after its members were decided is discarded too. A dropped group is replaced by a new draw. Cancelling
a member reaches agent, sandbox and engine through the runner. Called by training/batch_source.py and
`benchmarks/async_.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from insitu.agents.base import AwayTime, no_time
from insitu.attempt import AttemptSpec
from insitu.collect.breaker import Breaker
from insitu.collect.dispatcher import (
    AttemptRunner,
    Check,
    RolloutObserver,
    Slot,
    limit_s,
    nothing_to_check,
)
from insitu.collect.options import AsyncOptions, GroupSink, RejectReason, ResumeState, TaskSupply, accept_all
from insitu.collect.pending_group import (
    PendingGroup,
    PendingRollout,
    ResumedGroup,
    describe_pending,
    new_pending_group,
)
from insitu.collect.staleness import leaves_room, places, slack, too_old, window
from insitu.collect.starvation import Starvation
from insitu.collect.stats import CollectedBatch, CollectStats
from insitu.collect.timeouts import AttemptDeadline
from insitu.errors import first_error
from insitu.types import Group, Rollout, Status


@dataclass(slots=True)
class _State:
    """What changes while a collector runs."""

    version: int
    next_draw: int
    delivered: int
    taken: int = 0
    """Groups handed over for the version in force."""
    replaced: int = 0
    """Groups of no use that were replaced under the version in force."""
    active: dict[int, PendingGroup] = field(default_factory=dict)
    """Running and ready, in the order of their draws."""


class Collector:
    """See the module. Use it inside `open`."""

    def __init__(
        self,
        attempts: AttemptRunner,
        sink: GroupSink,
        watcher: RolloutObserver,
        breaker: Breaker,
        options: AsyncOptions,
        supply: TaskSupply,
        *,
        use: RejectReason = accept_all,
        check: Check = nothing_to_check,
        warn: Callable[[str], None] = lambda line: None,
        version: int = 0,
        before: ResumeState | None = None,
    ) -> None:
        """`version`: policy version in force. `warn` gets lines for a person."""
        self._attempts, self._sink, self._watcher, self._breaker = attempts, sink, watcher, breaker
        self._options, self._supply, self._use, self._check, self._warn = options, supply, use, check, warn
        self._before = before or ResumeState()
        self._now = _State(version, self._before.next_draw, self._before.delivered)
        self._live = asyncio.Event()
        """Clear while new weights are on their way to the engine: nothing is begun for old ones then."""
        self._news = asyncio.Event()
        self._tally = CollectStats()
        self._starving: Starvation | None = None
        self._last_error = ""
        self._running: asyncio.TaskGroup

    # ------------------------------------------------------------------ life

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Collector]:
        """Groups are under way inside. What breaks the run (breaker, check, a defect) is raised here."""
        try:
            async with asyncio.TaskGroup() as self._running:
                self._live.set()
                for held in self._before.draws:
                    self._draw(held.number, held)
                self._admit()
                try:
                    yield self
                finally:
                    for draft in self._now.active.values():
                        if draft.filling is not None:
                            draft.filling.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    # ------------------------------------------------------------------ the trainer's side

    async def next_batch(self) -> CollectedBatch:
        """The next P groups, oldest first as far as they are ready; fewer only when the demand is met.

        Raises TrainError when nothing has moved for the limit.
        """
        now, state = self._clock(), self._now
        batch: list[PendingGroup] = []
        self._starving = Starvation(now, self._options.stall_timeout_s, self._warn)
        while len(batch) < self._options.groups and state.active:
            draft = self._eligible(self._options.groups - len(batch))
            if draft is None:
                self._skip_retries()
                await self._until_news(self._starving)
                continue
            del state.active[draft.number]
            state.taken += 1
            state.delivered += 1
            batch.append(draft)
        self._starving = None
        running = sum(draft.group is None for draft in state.active.values())
        return self._tally.batch(
            batch,
            state.version,
            waited_s=self._clock() - now,
            running=running,
            ready=len(state.active) - running,
        )

    def version_pending(self, version: int) -> None:
        """The trainer has made a version and the engine does not sample with it yet: what could not be
        trained any more is cancelled, and nothing is begun until it is live."""
        self._live.clear()
        self._expire(version)

    def version_published(self, version: int) -> None:
        """The engine samples with it; also called, with the version in force, after a skipped step."""
        self._now.version, self._now.taken, self._now.replaced = version, 0, 0
        self._expire(version)
        self._live.set()
        self._admit()

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Draw as long as there is room and demand."""
        o, state = self._options, self._now
        while (
            self._live.is_set()
            and len(state.active) + state.taken < places(o.groups, o.staleness)
            and len(state.active) + state.delivered < o.total
        ):
            state.next_draw += 1
            self._draw(state.next_draw - 1)

    def _draw(self, number: int, held: ResumedGroup | None = None) -> None:
        o = self._options
        step, group = 1 + number // o.groups, number % o.groups
        slots = [Slot(phase="train", step=step, group=group, slot=s) for s in range(o.members.group_size)]
        task = self._supply(number) if held is None else held.task
        draft = new_pending_group(number, task, slots, self._now.version, held)
        if held is None:
            self._sink.plan(slots, task.id, self._now.version)
            self._tally.drawn += 1
        elif too_old(draft.oldest, self._now.version, o.staleness):
            self._drop(draft, "stale")
            return
        self._now.active[number] = draft
        draft.filling = self._running.create_task(self._fill(draft))

    def _eligible(self, missing: int) -> PendingGroup | None:
        """The oldest ready group that may be one of the `missing` of this batch: within the window, which
        begins at the oldest active one, and in no place that an older one will need."""
        o, active, version = self._options, self._now.active, self._now.version
        ends = next(iter(active)) + window(o.lookahead, o.groups, o.staleness)
        slacks = [slack(draft.oldest, version, o.staleness) for draft in active.values()]
        for draft, own in zip(active.values(), slacks, strict=True):
            if draft.group is None or draft.number >= ends:
                continue
            if o.late_groups == "cancel" or leaves_room(own, slacks, missing, o.groups):
                return draft
        return None

    def _skip_retries(self) -> None:
        """late_groups = "skip": groups that no later batch can train, and in which nothing but further tries
        is undecided, go without these if enough of them are graded."""
        o, version = self._options, self._now.version
        for draft in self._now.active.values() if o.late_groups == "skip" else ():
            if draft.group is None and slack(draft.oldest, version, o.staleness) <= 0:
                draft.skip_retries(o.group_min)

    def _expire(self, version: int) -> None:
        """Give up what even the next batch would find too old."""
        for draft in list(self._now.active.values()):
            if too_old(draft.oldest, version, self._options.staleness):
                self._doom(draft, "stale")

    def _doom(self, draft: PendingGroup, reason: str) -> None:
        del self._now.active[draft.number]
        draft.doom = reason
        if draft.group is not None or draft.filling is None:
            self._drop(draft, reason)
        else:
            draft.filling.cancel()

    def _drop(self, draft: PendingGroup, reason: str) -> None:
        """None of the group is trained. Members given up at the deadline were discarded already."""
        self._sink.discard(draft.ids, reason)
        self._tally.dropped(draft, reason)

    # ------------------------------------------------------------------ filling a group

    async def _fill(self, draft: PendingGroup) -> None:
        try:
            async with asyncio.TaskGroup() as deciding:
                for member in draft.members:
                    if member.waited_for:
                        member.deciding = deciding.create_task(self._member(draft, member))
                    elif member.rollout is not None:
                        self._finished(member.rollout)
        except asyncio.CancelledError:
            if not draft.doom:
                raise
        if draft.doom:
            self._drop(draft, draft.doom)
        else:
            self._settle(draft)

    def _settle(self, draft: PendingGroup) -> None:
        """Every member is decided or given up."""
        draft.group = Group(id=draft.id, task_id=draft.task.id, rollouts=tuple(draft.decided))
        reason = self._use(draft.group) if draft.decided else "deadline"
        if reason and (self._now.replaced < self._options.replace_degenerate or not draft.decided):
            self._now.replaced += 1
            self._doom(draft, reason)
            self._admit()
        self._news.set()

    async def _member(self, draft: PendingGroup, member: PendingRollout) -> None:
        try:
            await self._decide(draft, member)
        except asyncio.CancelledError:
            if not member.left:
                raise
            self._give_up(member)

    async def _decide(self, draft: PendingGroup, member: PendingRollout) -> None:
        o = self._options
        for attempt in range(o.members.attempts):
            if attempt:
                await asyncio.sleep(o.members.pause_s * 2 ** (attempt - 1))
            try:
                rollout = await self._try(draft, member)
            except TimeoutError:
                self._give_up(member)
                name = member.slot.rollout_id
                self._breaker.record(True, f"{name} was undecided when the time of its try was over")
                return
            if rollout.status is not Status.INFRA_FAILED:
                self._breaker.record(False, "")
                break
            self._last_error = rollout.error
            self._sink.attempted(member.slot, rollout)
            await self._check()
            self._breaker.record(True, rollout.error)
            member.failed = True
            self._news.set()
        self._sink.put(member.slot, rollout)
        member.decide(rollout)
        self._finished(rollout)

    def _give_up(self, member: PendingRollout) -> None:
        """Its group goes on without it."""
        member.given_up = True
        self._sink.discard([member.slot.rollout_id], "deadline")
        self._tally.late += 1
        self._moved()

    async def _try(self, draft: PendingGroup, member: PendingRollout) -> Rollout:
        """One try, begun when it has a worker and the weights in force are live. A runner that answers its
        cancellation with a rollout has been cancelled all the same. Raises TimeoutError when it hangs."""
        o, task = self._options, draft.bounded(self._options.deadline_s)
        member.tried += 1
        spec = AttemptSpec(
            rollout_id=member.slot.rollout_id,
            task=task,
            seed=o.members.seed,
            attempt=member.tried,
            temperature=o.members.temperature,
        )

        def began(away_s: AwayTime = no_time, /) -> None:
            member.begin(self._clock(), self._now.version)
            self._sink.start(spec.rollout_id, spec.attempt, self._now.version)
            self._watcher.rollout_started(spec.rollout_id)
            self._moved()
            cut.start(limit_s(task, o.grace_s), away_s)

        def cancelled(rollout: Rollout) -> None:
            # unused: the whole run ends, and the try is repeated should it be resumed
            reason = draft.doom or ("deadline" if cut.expired() or member.left else "unused")
            if reason != "unused" or member.running_since is not None:
                self._sink.cancelled(member.slot, rollout, reason)

        try:
            async with AttemptDeadline() as cut:
                rollout = await self._attempts.run(spec, began, cancelled, self._live.wait)
                ours = asyncio.current_task()
                if ours is not None and ours.cancelling():
                    cancelled(rollout)
                    raise asyncio.CancelledError
        except (asyncio.CancelledError, TimeoutError):
            self._tally.lost(member.end(self._clock()))
            raise
        seconds = member.end(self._clock())
        if rollout.status is Status.INFRA_FAILED:
            self._tally.lost(seconds)
        else:
            member.spent_s = seconds
        return rollout

    # ------------------------------------------------------------------ waiting

    async def _until_news(self, starving: Starvation) -> None:
        deadline_s, drafts = self._options.deadline_s, self._now.active.values()
        walls = [draft.bounded(deadline_s).limits.wall_s for draft in drafts if draft.group is None]
        starving.allow(2 * max(walls, default=0.0))
        self._news.clear()
        try:
            async with asyncio.timeout_at(starving.next_at):
                await self._news.wait()
        except TimeoutError:
            starving.look(self._clock(), self._standing())

    def _standing(self) -> str:
        line = describe_pending(self._now.active.values())
        return f"{line}; the last failure: {self._last_error}" if self._last_error else line

    def _moved(self) -> None:
        if self._starving is not None:
            self._starving.moved(self._clock())

    def _finished(self, rollout: Rollout) -> None:
        self._moved()
        tokens = rollout.trajectory.ledger.captured
        self._watcher.rollout_finished(rollout.id, reward=rollout.reward, tokens=tokens)

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()
