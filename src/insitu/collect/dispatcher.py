"""Fill groups: every slot is decided exactly once and reaches the sink exactly once.

    Dispatcher --spec--> AttemptRunner.run --Rollout--> bounded retries if infra --> sink.put --> Group

Slots wait on the worker pool and share nothing else. A slot that the sink already has (after a resume) is not
run again. When something all slots depend on has failed (the learner), the step ends at once without deciding
a slot. An attempt that hangs counts as an infrastructure failure; a step without progress ends the run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from insitu.agents.base import AwayTime, no_time
from insitu.attempt import NOTHING_SAMPLED, AttemptSpec, OnStart, ignore_cancelled, no_wait
from insitu.backoff import backoff_s
from insitu.capture.ledger import reassign
from insitu.collect.breaker import Breaker
from insitu.collect.starvation import Starvation
from insitu.collect.timeouts import AttemptDeadline
from insitu.errors import first_error
from insitu.types import Group, Rollout, Status, Task

Phase = Literal["train", "eval_before", "eval_during", "eval_after", "rollout"]
"""rollout = attempts of `insitu rollout`, without training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Position of a rollout in a run."""

    phase: Phase
    step: int
    group: int
    slot: int

    @property
    def rollout_id(self) -> str:
        """Id that sorts in time order and survives a resume: random streams and minted ids depend on it."""
        return f"{self.phase}/{self.step:05d}/{self.group:03d}/{self.slot:02d}"


class Sink(Protocol):
    """Storage for decided rollouts; durable before `put` returns."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """Record the planned rollouts of a group; repeated after a resume."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """Record that an attempt has got its worker."""

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        """Record a failed attempt; if it was the last, the rollout arrives by `put` too."""

    def held(self, phase: Phase, step: int) -> Mapping[str, Rollout]:
        """Return the rollouts already decided for a step, by rollout id.

        A rollout that only failed because of the infrastructure is left out while it can be retried.
        """

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        """Return the number of the last known attempt by rollout id, for a step."""


class RolloutObserver(Protocol):
    """Observer of rollouts (the view); must not raise and must not block."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """Options for filling groups."""

    seed: int
    group_size: int
    attempts: int = 3
    """Attempts per slot; only infrastructure failures are retried."""
    pause_s: float = 0.5
    """Backoff before the second attempt; doubled for each further one."""
    temperature: float = 1.0
    whole: bool = True
    """False: returned rollouts contain no tokens and no files (the sink has them), to save memory."""
    grace_s: float = math.inf
    """Seconds after the wall limit for sealing and grading; then the attempt is an infrastructure failure."""
    stall_timeout_s: float = math.inf
    """Seconds without a rollout begun or decided in a step after which the run ends."""


def limit_s(task: Task, grace_s: float) -> float:
    """Return the seconds from an attempt's start until it must be decided, without engine downtime."""
    # A grading may take its own timeout, and be repeated once.
    return task.limits.wall_s + max(grace_s, 2 * task.grading.timeout_s)


class AttemptRunner(Protocol):
    """Runs one attempt: `attempt.AttemptExecutor`, or a fake."""

    async def run(
        self,
        spec: AttemptSpec,
        on_start: OnStart,
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        """Run one attempt.

        `ready` is awaited when a worker is available; nothing is awaited between it and `on_start`, which
        gets the engine downtime where that is known. `on_cancelled` is called with the partial rollout when
        the coroutine was cancelled and everything that ran for the attempt has been partial.
        """


Check = Callable[[], Awaitable[None]]
"""Called after a failed attempt; raises when no attempt can succeed any more."""


async def nothing_to_check() -> None:
    """No-op check."""


class Dispatcher:
    """Collects the groups of one step at a time (synchronous mode)."""

    def __init__(
        self,
        attempts: AttemptRunner,
        sink: Sink,
        watcher: RolloutObserver,
        breaker: Breaker,
        options: CollectOptions,
        *,
        check: Check = nothing_to_check,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create a dispatcher; `version` returns the current policy version."""
        self._attempts, self._sink, self._watcher = attempts, sink, watcher
        self._breaker, self._options, self._check, self._version = breaker, options, check, version
        self._starving: Starvation | None = None
        self._last_error = ""

    async def collect(
        self, phase: Phase, step: int, tasks: Sequence[Task], *, group_size: int | None = None
    ) -> Sequence[Group]:
        """Return one group per task, in task order, slots in order.

        Raises when breaker or check stop the run, and TrainError at the stall timeout.
        """
        size = group_size or self._options.group_size
        held, tried = self._sink.held(phase, step), self._sink.tried(phase, step)
        slots = [
            (Slot(phase=phase, step=step, group=g, slot=s), task)
            for g, task in enumerate(tasks)
            for s in range(size)
        ]
        for g, task in enumerate(tasks):
            self._sink.plan([slot for slot, _ in slots[g * size : (g + 1) * size]], task.id, self._version())
        try:
            async with asyncio.TaskGroup() as running:
                pending = [
                    running.create_task(
                        self._decide(slot, task, held.get(slot.rollout_id), tried.get(slot.rollout_id, 0))
                    )
                    for slot, task in slots
                ]
                watch = running.create_task(self._watch(tasks, pending))
                if pending:
                    await asyncio.wait(pending)
                watch.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        rollouts = [task.result() for task in pending]
        return [
            Group(
                id=f"{phase}/{step:05d}/{g:03d}",
                task_id=task.id,
                rollouts=tuple(rollouts[g * size : (g + 1) * size]),
            )
            for g, task in enumerate(tasks)
        ]

    async def _decide(self, slot: Slot, task: Task, held: Rollout | None, tried: int) -> Rollout:
        """Decide one slot; `tried` is the number of its last attempt in an earlier process."""
        # Numbering continues after `tried`, so that the account of an earlier attempt is not overwritten.
        if held is not None:
            self._finished(held)
            return held
        for attempt in range(self._options.attempts):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, self._options.pause_s))
            spec = AttemptSpec(
                rollout_id=slot.rollout_id,
                task=task,
                seed=self._options.seed,
                attempt=tried + attempt + 1,
                temperature=self._options.temperature,
                evaluation=slot.phase != "train",
            )
            rollout = await self._attempt(spec)
            if rollout.status is not Status.INFRA_FAILED:
                self._breaker.record(False, "")
                break
            self._last_error = rollout.error
            self._sink.attempted(slot, rollout)
            await self._check()
            self._breaker.record(True, rollout.error)
        self._sink.put(slot, rollout)
        self._finished(rollout)
        return rollout if self._options.whole else replace(rollout, trajectory=NOTHING_SAMPLED, changed={})

    async def _attempt(self, spec: AttemptSpec) -> Rollout:
        """Run one attempt; return a failed rollout if it exceeds its time limit."""
        limit, partial = limit_s(spec.task, self._options.grace_s), list[Rollout]()

        def on_start(away_s: AwayTime = no_time, /) -> None:
            self._sink.start(spec.rollout_id, spec.attempt, self._version())
            self._watcher.rollout_started(spec.rollout_id)
            self._moved()
            deadline.start(limit, away_s)

        try:
            async with AttemptDeadline() as deadline:
                return await self._attempts.run(spec, on_start, partial.append)
        except TimeoutError:
            if not (deadline.expired() and partial):
                raise
        sampled = partial[0].trajectory
        return replace(
            partial[0],
            trajectory=replace(sampled, ledger=reassign(sampled.ledger, "infra")),
            error=f"timeout: the attempt did not finish within {limit:.0f} s",
        )

    async def _watch(self, tasks: Sequence[Task], pending: Sequence[asyncio.Task[Rollout]]) -> None:
        """End a step without progress; an attempt within its own time limit does not count as stalled."""
        o = self._options
        if not math.isfinite(o.stall_timeout_s):
            return
        least = max((task.limits.wall_s for task in tasks), default=0.0)
        starving = Starvation(_now(), max(o.stall_timeout_s, 2 * least), marks=())
        self._starving = starving
        while True:
            await asyncio.sleep(starving.next_at - _now())
            line = f"{sum(task.done() for task in pending)} of {len(pending)} rollouts are decided"
            last = f"; last failure: {self._last_error}" if self._last_error else ""
            starving.look(_now(), line + last)

    def _moved(self) -> None:
        if self._starving is not None:
            self._starving.moved(_now())

    def _finished(self, rollout: Rollout) -> None:
        self._moved()
        tokens = rollout.trajectory.ledger.captured
        self._watcher.rollout_finished(rollout.id, reward=rollout.reward, tokens=tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()
