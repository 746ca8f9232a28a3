"""Collect groups: a list of tasks, or for the trainer, no further ahead than the staleness bound allows.

    supply(n) -> draw -> members run -> group -> ready --window--> next_batch -> trainer
                  ^                       |                                        |
                  +--- room: running + ready + taken <= (S + 1) * P <--- version_published

Every planned rollout reaches the sink once: decided (`put`) or given up (`discard`); a group that is dropped
after its members were decided is discarded too. A dropped group is replaced by a new draw. Cancelling a
member cancels agent, sandbox and engine requests through the runner.

With max_staleness = 0 groups are drawn when a batch is requested and none is replaced, so a batch depends on
nothing but the seed: a run of a scripted agent is reproducible bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from insitu.agents.base import Clock, loop_time
from insitu.attempt import NOTHING_SAMPLED, AttemptSpec
from insitu.backoff import backoff_s
from insitu.collect.breaker import Breaker
from insitu.collect.options import (
    AttemptRunner,
    Check,
    CollectOptions,
    GroupScorer,
    RejectReason,
    RolloutObserver,
    Sink,
    TaskSupply,
    accept_all,
    limit_s,
    nothing_to_check,
)
from insitu.collect.pending_group import (
    PendingGroup,
    PendingRollout,
    ResumedGroup,
    ResumeState,
    describe_pending,
    new_pending_group,
)
from insitu.collect.staleness import leaves_room, places, slack, too_old, window
from insitu.collect.starvation import MARKS_S, Activity, Starvation
from insitu.collect.stats import CollectedBatch, CollectStats
from insitu.collect.timeouts import AttemptDeadline, timed_out
from insitu.errors import first_error
from insitu.types import Group, Rollout, Status


@dataclass(slots=True)
class _State:
    """Mutable state of a collector."""

    version: int
    next_draw: int
    delivered: int
    taken: int = 0
    """Groups delivered for the current version."""
    replaced: int = 0
    """Rejected groups replaced under the current version."""
    active: dict[int, PendingGroup] = field(default_factory=dict)
    """Running and ready groups, in the order of their draws."""


def without_tokens(rollout: Rollout) -> Rollout:
    """Return a rollout with its result and the labels of its turns; the sink has the tokens and files."""
    turns = tuple(
        replace(turn, context_ids=turn.ids[[]], ids=turn.ids[[]], logprobs=None, version_runs=(), spans=())
        for turn in rollout.trajectory.turns
    )
    return replace(rollout, trajectory=replace(NOTHING_SAMPLED, turns=turns), changed={})


class Collector:
    """Fills groups; use it inside `open`."""

    def __init__(
        self,
        attempts: AttemptRunner,
        sink: Sink,
        watcher: RolloutObserver,
        breaker: Breaker,
        options: CollectOptions,
        supply: TaskSupply,
        *,
        reject_reason: RejectReason = accept_all,
        check: Check = nothing_to_check,
        warn: Callable[[str], None] = lambda line: None,
        version: int = 0,
        resume: ResumeState | None = None,
        activity: Activity | None = None,
    ) -> None:
        """Create a collector at policy version `version`; `warn` gets lines for the user.

        `activity`: that of all collectors that share the workers.
        """
        self._attempts, self._sink, self._watcher, self._breaker = attempts, sink, watcher, breaker
        self._options, self._supply, self._reject_reason, self._check, self._warn = (
            options,
            supply,
            reject_reason,
            check,
            warn,
        )
        self._resume = resume or ResumeState()
        self._replacements = round(options.replace_degenerate * options.groups) * bool(options.max_staleness)
        """Rejected groups that are replaced per version; further ones are delivered as they are."""
        self._state = _State(version, self._resume.next_draw, self._resume.delivered)
        self._live = asyncio.Event()
        """Cleared while new weights are being published: no attempt starts with old ones then."""
        self._news = asyncio.Event()
        self._scorer = attempts if isinstance(attempts, GroupScorer) and attempts.scores_groups else None
        self._tally = CollectStats()
        self._activity = activity or Activity()
        self._last_error = ""
        self._running: asyncio.TaskGroup

    # ------------------------------------------------------------------ life

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Collector]:
        """Run groups inside the context; raise what ends the run (breaker, check, a defect)."""
        try:
            async with asyncio.TaskGroup() as self._running:
                self._live.set()
                for resumed in self._resume.draws:
                    self._draw(resumed.number, resumed)
                if self._options.max_staleness:
                    self._admit()
                try:
                    yield self
                finally:
                    for pending in self._state.active.values():
                        if pending.filling is not None:
                            pending.filling.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    # ------------------------------------------------------------------ the trainer's side

    def draw(self) -> None:
        """Draw groups as `next_batch` does: their rollouts queue for workers before those that come later."""
        self._admit()

    async def next_batch(self) -> CollectedBatch:
        """Return the next P groups, the oldest ready ones, in order of their draws; fewer only at the end.

        Raises TrainError when the stall timeout is over.
        """
        now, state, o = self._clock(), self._state, self._options
        batch: list[PendingGroup] = []
        self._admit()
        # A synchronous batch has to be waited for: only one that stalls is a fault.
        marks = MARKS_S if o.max_staleness else ()
        starving = Starvation(now, o.stall_timeout_s, self._activity, self._warn, marks)
        while len(batch) < o.groups and state.active:
            pending = self._eligible(o.groups - len(batch))
            if pending is None:
                self._skip_retries()
                await self._until_news(starving)
                continue
            del state.active[pending.number]
            state.taken += 1
            state.delivered += 1
            batch.append(pending)
        running = sum(pending.group is None for pending in state.active.values())
        return self._tally.batch(
            sorted(batch, key=lambda pending: pending.number),
            state.version,
            waited_s=self._clock() - now,
            running=running,
            ready=len(state.active) - running,
        )

    def version_pending(self, version: int) -> None:
        """Handle a new version that is not live yet: cancel stale groups and start no attempt until it is."""
        self._live.clear()
        self._expire(version)

    def version_published(self, version: int) -> None:
        """Handle a version going live; also called, with the current version, after a skipped step."""
        self._state.version, self._state.taken, self._state.replaced = version, 0, 0
        self._expire(version)
        self._live.set()
        if self._options.max_staleness:
            self._admit()

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Draw groups while there is room and demand."""
        o, state = self._options, self._state
        while (
            self._live.is_set()
            and len(state.active) + state.taken < places(o.groups, o.max_staleness)
            and len(state.active) + state.delivered < o.total
        ):
            state.next_draw += 1
            self._draw(state.next_draw - 1)

    def _draw(self, number: int, resumed: ResumedGroup | None = None) -> None:
        slots = self._options.slots(number)
        task = self._supply(number) if resumed is None else resumed.task
        pending = new_pending_group(number, task, slots, self._state.version, resumed)
        if resumed is None:
            self._sink.plan(slots, task.id, self._state.version)
            self._tally.drawn += 1
        elif self._options.max_staleness and too_old(
            pending.oldest, self._state.version, self._options.max_staleness
        ):
            # A resumed synchronous batch has the same weights, if under a later version of the engine.
            self._drop(pending, "stale")
            return
        self._state.active[number] = pending
        pending.filling = self._running.create_task(self._fill(pending))

    def _eligible(self, missing: int) -> PendingGroup | None:
        """Return the oldest ready group that may be one of the `missing` of this batch, if any.

        It must be within the window, which starts at the oldest active group, and must not take a place that
        an older group will need.
        """
        o, active, version = self._options, self._state.active, self._state.version
        ends = next(iter(active)) + window(o.lookahead, o.groups, o.max_staleness)
        ready = [
            pending for pending in active.values() if pending.group is not None and pending.number < ends
        ]
        if not ready or o.late_groups == "cancel":
            return ready[0] if ready else None
        slacks = [slack(pending.oldest, version, o.max_staleness) for pending in active.values()]
        for pending in ready:
            own = slack(pending.oldest, version, o.max_staleness)
            if leaves_room(own, slacks, missing, o.groups):
                return pending
        return None

    def _skip_retries(self) -> None:
        """Skip retries of groups that no later batch can train (late_groups = "skip")."""
        o, version = self._options, self._state.version
        for pending in self._state.active.values() if o.late_groups == "skip" else ():
            if pending.group is None and slack(pending.oldest, version, o.max_staleness) <= 0:
                pending.skip_retries(o.group_min)

    def _expire(self, version: int) -> None:
        """Drop groups that would be too old even for the next batch."""
        for pending in list(self._state.active.values()):
            if too_old(pending.oldest, version, self._options.max_staleness):
                self._cancel_group(pending, "stale")

    def _cancel_group(self, pending: PendingGroup, reason: str) -> None:
        del self._state.active[pending.number]
        pending.drop_reason = reason
        if pending.group is not None or pending.filling is None:
            self._drop(pending, reason)
        else:
            pending.filling.cancel()

    def _drop(self, pending: PendingGroup, reason: str) -> None:
        """Discard the group; members given up at the deadline were discarded already."""
        self._sink.discard(pending.ids, reason)
        self._tally.dropped(pending, reason)

    # ------------------------------------------------------------------ filling a group

    async def _fill(self, pending: PendingGroup) -> None:
        try:
            async with asyncio.TaskGroup() as deciding:
                for member in pending.members:
                    if member.undecided:
                        member.deciding = deciding.create_task(self._member(pending, member))
                    elif member.rollout is not None and self._scorer is None:
                        self._finished(member.rollout)
            await self._score(pending)
        except asyncio.CancelledError:
            if not pending.drop_reason:
                raise
        if pending.drop_reason:
            self._drop(pending, pending.drop_reason)
        else:
            self._settle(pending)

    async def _score(self, pending: PendingGroup) -> None:
        """Score the members together if their rewards need the whole group."""
        if self._scorer is None:
            return
        decided = [member for member in pending.members if member.rollout is not None]
        rollouts = await self._scorer.score_group(pending.task, pending.decided)
        for member, rollout in zip(decided, rollouts, strict=True):
            self._sink.rescored(rollout)
            self._finished(rollout)
            member.rollout = self._kept(rollout)

    def _kept(self, rollout: Rollout) -> Rollout:
        """Return the rollout without tokens and files unless the caller needs them."""
        return rollout if self._options.whole else without_tokens(rollout)

    def _settle(self, pending: PendingGroup) -> None:
        """Finish a group whose members are all decided or given up."""
        pending.group = Group(id=pending.id, task_id=pending.task.id, rollouts=tuple(pending.decided))
        reason = self._reject_reason(pending.group) if pending.decided else "deadline"
        if reason and (self._state.replaced < self._replacements or not pending.decided):
            self._state.replaced += 1
            self._cancel_group(pending, reason)
            self._admit()
        self._news.set()

    async def _member(self, pending: PendingGroup, member: PendingRollout) -> None:
        try:
            await self._decide(pending, member)
        except asyncio.CancelledError:
            if not member.skipped:
                raise
            self._give_up(member)

    async def _decide(self, pending: PendingGroup, member: PendingRollout) -> None:
        o = self._options
        for attempt in range(o.attempts):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, o.pause_s))
            try:
                rollout = await self._attempt(pending, member)
            except TimeoutError:
                self._give_up(member)
                name = member.slot.rollout_id
                self._breaker.record(True, f"{name}: timeout: the attempt did not finish within its limit")
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
        if self._scorer is None:
            self._finished(rollout)
            rollout = self._kept(rollout)
        else:
            self._moved()
        member.decide(rollout)
        pending.update_oldest()

    def _give_up(self, member: PendingRollout) -> None:
        """Continue the group without this member."""
        member.given_up = True
        self._sink.discard([member.slot.rollout_id], "deadline")
        self._tally.late += 1
        self._moved()

    async def _attempt(self, pending: PendingGroup, member: PendingRollout) -> Rollout:
        """Run one attempt, started when it has a worker and the current weights are live.

        Raises TimeoutError when it hangs, CancelledError even if the runner answers its cancellation with a
        rollout.
        """
        o, task = self._options, pending.bounded(self._options.group_deadline_s)
        limit = limit_s(task, o.group_grace_s)
        member.tried += 1
        spec = AttemptSpec(
            rollout_id=member.slot.rollout_id,
            task=task.of_rollout(member.slot.slot),
            seed=o.seed,
            attempt=member.tried,
            temperature=o.temperature,
            evaluation=o.phase != "train",
        )
        partial: list[Rollout] = []

        def on_start(clock: Clock = loop_time, /) -> None:
            member.begin(self._clock(), self._state.version)
            pending.update_oldest()
            self._sink.start(spec.rollout_id, spec.attempt, self._state.version)
            self._watcher.rollout_started(spec.rollout_id)
            self._moved()
            deadline.start(limit, clock)

        def on_cancelled(rollout: Rollout) -> None:
            partial.append(rollout)
            if deadline.expired() and not o.max_staleness:
                return  # repeated below
            # unused: the whole run ends, and a resumed run repeats the attempt
            reason = pending.drop_reason or ("deadline" if deadline.expired() or member.skipped else "unused")
            if reason != "unused" or member.running_since is not None:
                self._sink.cancelled(member.slot, rollout, reason)

        try:
            async with AttemptDeadline() as deadline:
                # In a task of its own: before Python 3.13 a TaskGroup that fails inside leaves its task
                # marked as being cancelled, and a failed attempt would pass for a cancelled one here.
                running = asyncio.ensure_future(
                    self._attempts.run(spec, on_start, on_cancelled, self._live.wait)
                )
                rollout = await running
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    on_cancelled(rollout)
                    raise asyncio.CancelledError
        except (asyncio.CancelledError, TimeoutError):
            # No later batch is delayed by a synchronous one: an attempt that hangs is repeated there.
            if not (deadline.expired() and partial) or o.max_staleness:
                self._tally.lost(self._end(pending, member))
                raise
            rollout = timed_out(partial[0], limit)
        seconds = self._end(pending, member)
        if rollout.status is Status.INFRA_FAILED:
            self._tally.lost(seconds)
        else:
            member.spent_s = seconds
        return rollout

    def _end(self, pending: PendingGroup, member: PendingRollout) -> float:
        """End the attempt of a member; return its rollout-seconds."""
        seconds = member.end(self._clock())
        pending.update_oldest()
        return seconds

    # ------------------------------------------------------------------ waiting

    async def _until_news(self, starving: Starvation) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout_at(starving.next_at):
                await self._news.wait()
        except TimeoutError:
            deadline_s, drafts = self._options.group_deadline_s, self._state.active.values()
            walls = [pending.wall_s(deadline_s) for pending in drafts if pending.group is None]
            starving.allow(2 * max(walls, default=0.0))
            starving.look(self._clock(), self._progress())

    def _progress(self) -> str:
        line = describe_pending(self._state.active.values())
        return f"{line}; last failure: {self._last_error}" if self._last_error else line

    def _moved(self) -> None:
        self._activity.at_s = self._clock()

    def _finished(self, rollout: Rollout) -> None:
        self._moved()
        tokens = rollout.trajectory.ledger.captured
        self._watcher.rollout_finished(rollout.id, reward=rollout.reward, tokens=tokens)

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()
