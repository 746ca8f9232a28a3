"""Keeps a run going when its learner dies: a new process takes the place of the dead one.

    generate -> dead? -> restart -> load last committed checkpoint -> publish -> the same request again
    train    -> dead? ->   "                                              "  -> the same plan again

A request draws from a stream of its own, so what is asked again gives the same tokens under the same weights:
in a synchronous run no death shows in the result. `restarts` deaths without a committed step in between end
the run: what dies again and again dies of a cause. Never imports torch. Called by the loops, and by the
gateway as its engine.

The process has one thread: what trains, saves or publishes does not sample. Requests that come meanwhile
wait here, and their agents' clocks stand still; those that are with it already end first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from insitu.engines.base import Engine
from insitu.engines.downtime import engine_down
from insitu.engines.wrapper import EngineWrapper
from insitu.errors import EngineError, TrainError
from insitu.training.options import StepResult
from insitu.training.plan.step import StepPlan
from insitu.training.weights.files import Publisher
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

Committed = Callable[[], Path | None]
"""Where the last committed step's checkpoint is; None before the first."""


class RestartableLearner(Protocol):
    """A learner as far as its deaths go: client.Learner, or a fake."""

    @property
    def alive(self) -> bool: ...

    @property
    def version(self) -> int: ...

    @property
    def weights(self) -> str: ...

    async def death(self) -> EngineError: ...

    async def restart(self) -> None: ...

    async def step(self, plan: StepPlan) -> StepResult: ...

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step whose checkpoint is on disk, still to be committed."""

    result: StepResult
    weights: str
    """Hex digest over all tensors after it."""
    life: int
    """Which learner process it was, counted from 0."""


class LearnerSupervisor:
    """See the module. Deadlines are the learner's own."""

    def __init__(
        self,
        learner: RestartableLearner,
        publisher: Publisher,
        committed: Committed,
        *,
        restarts: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` gets a line for a person at each death."""
        self._learner, self._publisher, self._committed = learner, publisher, committed
        self._restarts, self._say = restarts, say
        self._life = 0
        self._deaths = 0
        """Since the last committed step."""
        self._sound = True
        """False from a death until the new process has the right weights, also when whoever waited for it was
        cancelled."""
        self._mending = asyncio.Lock()
        """Held from a death until the new process has the right weights: nothing is asked of it before."""
        self._free = asyncio.Event()
        """Not set while the process trains, saves or publishes."""
        self._free.set()

    @property
    def restarts(self) -> int:
        """Learners that were started in the place of a dead one."""
        return self._life

    async def alive(self) -> int:
        """Which process it is, once there is one that holds the right weights. What follows without an await
        is asked of that process."""
        async with self._mending:
            if not self._sound:
                await self._restart()
            return self._life

    async def sampling(self) -> int:
        """As `alive`, once that process does nothing but sample."""
        while True:
            await self._free.wait()
            life = await self.alive()
            if self._free.is_set():
                return life

    async def mend(self, life: int) -> bool:
        """After a failure of what was asked of process `life`: True when that one is gone and another is in
        its place, False when it is there and failed by itself. Raises EngineError when it died too often."""
        async with self._mending:
            if self._life != life:
                return True
            if self._learner.alive and self._sound:
                return False
            await self._restart()
            return True

    async def begin(self) -> None:
        """Before anything is asked: the last committed step's weights, in trainer and engine."""
        life = await self.alive()
        try:
            async with self._mending:
                await self._catch_up()
        except (TrainError, EngineError):
            if not await self.mend(life):
                raise

    async def check(self) -> None:
        """As `Learner.check`, but a learner that is gone is replaced first."""
        await self.mend(await self.alive())

    async def train(self, plan: StepPlan, folder: Path) -> Trained:
        """Train one plan and write its checkpoint. A learner that dies on the way is replaced and gets the
        plan again. Raises TrainError when the trainer refused, EngineError when it died too often."""
        with self._busy():
            return await self._train(plan, folder)

    async def _train(self, plan: StepPlan, folder: Path) -> Trained:
        while True:
            life = await self.alive()
            try:
                async with self._publisher.training():
                    result = await self._learner.step(plan)
                weights = self._learner.weights
                if await self.alive() != life:
                    continue  # another request found it dead first; the new one has not trained this
                await self._learner.save(folder)
                return Trained(result=result, weights=weights, life=life)
            except TrainError:
                if not await self.mend(life):
                    raise

    async def publish(self, trained: Trained) -> None:
        """Sample with a step from now on, which is committed. Raises TrainError, EngineError."""
        self._deaths = 0
        with self._busy():
            await self._publish(trained)

    async def _publish(self, trained: Trained) -> None:
        while True:
            life = await self.alive()
            try:
                if life != trained.life:
                    async with self._mending:
                        await self._catch_up()
                elif not trained.result.skipped:
                    await self._publisher.publish(trained.result.version)
                return
            except (TrainError, EngineError):
                if not await self.mend(life):
                    raise

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    async def _restart(self) -> None:
        self._sound = False
        while not self._sound:
            try:
                if not self._learner.alive:
                    await self._replace()
                await self._catch_up()
                self._life += 1
                self._sound = True
            except (TrainError, EngineError):
                if self._learner.alive or self._deaths >= self._restarts:
                    raise

    async def _replace(self) -> None:
        cause = await self._learner.death()
        if self._deaths >= self._restarts:
            raise cause
        self._deaths += 1
        self._say(f"{cause}; it is started again ({self._deaths} of {self._restarts})")
        try:
            await self._learner.restart()
        except asyncio.CancelledError:
            self._deaths -= 1  # whoever waited went away: no death
            raise

    async def _catch_up(self) -> None:
        """The last committed step's weights, in trainer and engine."""
        folder = self._committed()
        if folder is not None:
            await self._learner.load(folder)
        await self._publisher.publish(self._learner.version)


class RetryingEngine(EngineWrapper):
    """The engine of a learner that may be replaced (`engines.base.Engine`): a request that its death cut
    short is made again, one that comes while it trains or publishes waits."""

    def __init__(self, engine: Engine, life: LearnerSupervisor) -> None:
        super().__init__(engine)
        self._life = life

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        while True:
            with engine_down():
                life = await self._life.sampling()
            try:
                return await self._inner.generate(ids, params, key)
            except EngineError:
                with engine_down():
                    mended = await self._life.mend(life)
                if not mended:
                    raise
