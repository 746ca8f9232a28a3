"""Fills groups: every slot is decided exactly once and reaches the sink exactly once.

    Dispatcher --spec--> Attempts.run --Rollout--> retry if infra, boundedly --> sink.put --> Group

Slots wait on the worker pool; nothing else is shared between them. A slot that the sink already holds (after
a resume) is not run again. When what all slots rest on is gone (the learner), the step ends at once: no slot
is decided by it. A try that hangs has failed of the infrastructure; a step in which nothing moves ends the
run. Called by training/loop.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from insitu.agents.base import AwayTime, no_time
from insitu.attempt import NOTHING_SAMPLED, AttemptSpec, Began, at_once, forget
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
    """Where a rollout belongs."""

    phase: Phase
    step: int
    group: int
    slot: int

    @property
    def rollout_id(self) -> str:
        """Sorts in time order and is the same after a resume: random streams and minted ids hang on it."""
        return f"{self.phase}/{self.step:05d}/{self.group:03d}/{self.slot:02d}"


class Sink(Protocol):
    """Where decided rollouts go; durable before `put` returns."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """These rollouts of a group are to be made; said again after a resume."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """A try has got its worker."""

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        """One try failed. If it was the last, it arrives by `put` too."""

    def held(self, phase: Phase, step: int) -> Mapping[str, Rollout]:
        """Rollouts already decided for a step, by rollout id. What only failed of the infrastructure is none
        of them as long as it can be run again."""

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        """Rollout id -> number of the last try known, for a step."""


class RolloutObserver(Protocol):
    """Who wants to know (the view); must not raise and must not wait."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """How groups are filled."""

    seed: int
    group_size: int
    attempts: int = 3
    """Tries per slot; only infrastructure failures start another."""
    pause_s: float = 0.5
    """Seconds before the second try; each further pause is twice as long."""
    temperature: float = 1.0
    whole: bool = True
    """False: what is returned holds no tokens and no files. The sink has them; many rollouts fill memory."""
    grace_s: float = math.inf
    """From the wall limit of a try, for sealing and grading: one that is undecided then has failed of the
    infrastructure."""
    stall_timeout_s: float = math.inf
    """Without a rollout begun or decided in a step: then the run ends."""


def limit_s(task: Task, grace_s: float) -> float:
    """From a try's start until it must be decided, outages apart (hang.py). A grading may take its own time,
    and once more."""
    return task.limits.wall_s + max(grace_s, 2 * task.grading.timeout_s)


class AttemptRunner(Protocol):
    """Decides one attempt: rollout.Attempts, or testing.FakeAttempts."""

    async def run(
        self,
        spec: AttemptSpec,
        began: Began,
        cancelled: Callable[[Rollout], None] = forget,
        ready: Callable[[], Awaitable[object]] = at_once,
    ) -> Rollout:
        """`ready` is awaited when a worker is at hand, and nothing is awaited between it and `began`,
        which hears for how long the attempt waits for an engine that is away, where that is known.
        `cancelled` is called with what there is, undecided, when the coroutine was cancelled and everything
        that ran for the attempt has been stopped."""


Check = Callable[[], Awaitable[None]]
"""Asked after a failed try. Raises when no try can succeed any more."""


async def nothing_to_check() -> None:
    """Nothing that all slots rest on is known."""


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
        """`version`: policy version in force."""
        self._attempts, self._sink, self._watcher = attempts, sink, watcher
        self._breaker, self._options, self._check, self._version = breaker, options, check, version
        self._starving: Starvation | None = None
        self._last_error = ""

    async def collect(
        self, phase: Phase, step: int, tasks: Sequence[Task], *, group_size: int | None = None
    ) -> Sequence[Group]:
        """One group per task, in task order, slots in order. Raises when breaker or check stop the run, and
        TrainError when nothing has moved for the limit."""
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
        """`tried`: number of the last try of an earlier process; its account must not be overwritten."""
        if held is not None:
            self._finished(held)
            return held
        for attempt in range(self._options.attempts):
            if attempt:
                await asyncio.sleep(self._options.pause_s * 2 ** (attempt - 1))
            spec = AttemptSpec(
                rollout_id=slot.rollout_id,
                task=task,
                seed=self._options.seed,
                attempt=tried + attempt + 1,
                temperature=self._options.temperature,
                evaluation=slot.phase != "train",
            )
            rollout = await self._try(spec)
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

    async def _try(self, spec: AttemptSpec) -> Rollout:
        """One try, decided in its time or failed."""
        limit, stopped = limit_s(spec.task, self._options.grace_s), list[Rollout]()

        def began(away_s: AwayTime = no_time, /) -> None:
            self._sink.start(spec.rollout_id, spec.attempt, self._version())
            self._watcher.rollout_started(spec.rollout_id)
            self._moved()
            cut.start(limit, away_s)

        try:
            async with AttemptDeadline() as cut:
                return await self._attempts.run(spec, began, stopped.append)
        except TimeoutError:
            if not (cut.expired() and stopped):
                raise
        sampled = stopped[0].trajectory
        return replace(
            stopped[0],
            trajectory=replace(sampled, ledger=reassign(sampled.ledger, "infra")),
            error=f"the try was undecided {limit:.0f} s after its start and was given up",
        )

    async def _watch(self, tasks: Sequence[Task], pending: Sequence[asyncio.Task[Rollout]]) -> None:
        """Ends a step in which nothing moves any more. No try may seem to be stuck in its own time."""
        o = self._options
        if not math.isfinite(o.stall_timeout_s):
            return
        least = max((task.limits.wall_s for task in tasks), default=0.0)
        starving = Starvation(_now(), max(o.stall_timeout_s, 2 * least), marks=())
        self._starving = starving
        while True:
            await asyncio.sleep(starving.next_at - _now())
            line = f"{sum(task.done() for task in pending)} of {len(pending)} rollouts are decided"
            last = f"; the last failure: {self._last_error}" if self._last_error else ""
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
