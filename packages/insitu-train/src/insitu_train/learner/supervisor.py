"""Restarts a dead learner and repeats what it was doing.

    train    -> dead? -> restart -> load checkpoint, replay later steps -> publish -> the same plan again
    generate -> dead? -> `check` ->   "     (engines/replicas.py)                  -> the same request again

Requests have their own random streams, so a repeated one gives the same tokens under the same weights: in a
synchronous run a death does not change the result. `restarts` deaths without a committed step end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from insitu.errors import EngineError, TrainError
from insitu_train.checkpoint_files import set_aside
from insitu_train.learner.client import Learner
from insitu_train.options import StepResult
from insitu_train.plan.step import StepPlan
from insitu_train.recovery import Committed, CommittedStep
from insitu_train.weights.files import Publisher

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step that is not committed yet."""

    result: StepResult
    weights: str
    """Hex digest over all tensors after it."""
    process: int
    """Number of the learner process, from 0."""


class LearnerSupervisor:
    """Supervises a learner; deadlines are the learner's own."""

    def __init__(
        self,
        learner: Learner,
        publisher: Publisher,
        committed: Callable[[], Committed],
        *,
        restarts: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Supervise.

        committed: returns what makes the state after the last committed step; say: receives warnings.
        """
        self._learner, self._publisher, self._committed = learner, publisher, committed
        self._restarts, self._say = restarts, say
        self._process = 0
        self._deaths = 0
        """Since the last committed step."""
        self._taken_in = 0
        """Processes that began for the sake of hosts that had come late."""
        self._weights_ready = True
        """False from a death until the new process has the right weights, even if the waiter was
        cancelled."""
        self._restart_lock = asyncio.Lock()
        """Held from a death until the new process has the right weights."""
        self._replaying = False
        """Still true after a replay was cancelled: the process holds an unknown number of steps."""

    @property
    def restarts(self) -> int:
        """Restarts so far of a learner that had died."""
        return self._process - self._taken_in

    async def ready(self) -> int:
        """Return the number of the process once it holds the right weights."""
        async with self._restart_lock:
            if not self._weights_ready:
                await self._restart()
            return self._process

    async def replace_dead(self, process: int) -> bool:
        """Replace process number `process` if it is dead; return whether it has been, now or before.

        Raises EngineError when it died too often.
        """
        async with self._restart_lock:
            if self._process != process:
                return True
            if self._learner.alive and self._weights_ready:
                return False
            await self._restart()
            return True

    async def begin(self) -> None:
        """Load and publish the last committed step's weights."""
        process = await self.ready()
        if self._learner.hosts:
            self._say(self._learner.hosts)
        try:
            async with self._restart_lock:
                await self._catch_up()
        except (TrainError, EngineError):
            if not await self.replace_dead(process):
                raise

    async def check(self) -> None:
        """Replace a dead learner."""
        await self.replace_dead(await self.ready())

    async def train(self, plan: StepPlan, scores: Path | None = None) -> Trained:
        """Train one plan, again in a new process if the learner dies.

        scores: see `Learner.step`.
        Raises TrainError when the trainer refused, EngineError when it died too often.
        """

        async def once(process: int) -> Trained:
            async with self._publisher.training():
                result = await self._learner.step(plan, scores)
            weights = self._learner.weights
            if await self.ready() != process:
                raise TrainError("the process was replaced and has not trained this")
            return Trained(result=result, weights=weights, process=process)

        return await self._until_done(once)

    async def save(self, folder: Path) -> str:
        """Begin a checkpoint of the last committed step; return why the one before failed, or empty."""
        return await self._until_done(lambda _: self._learner.save(folder))

    async def take_in(self) -> None:
        """Let the learner begin again with the hosts that wait, if there are any, from its last checkpoint.

        Raises TrainError, EngineError as after a death.
        """
        if not self._learner.waiting:
            return
        if failed := await self.written():  # its steps would be trained again
            self._say(failed)
        if failed or not self._learner.waiting:
            return
        self._say(f"train.ranks: the learner begins again with {self._learner.waiting}, which waited")
        async with self._learner.working(), self._restart_lock:
            self._weights_ready, self._replaying = False, True
            await self._restart()
            self._taken_in += 1

    async def written(self) -> str:
        """Wait for the checkpoint that is being written; return why it failed, or empty."""
        return await self._until_done(lambda _: self._learner.written())

    async def publish(self, trained: Trained) -> None:
        """Publish a committed step. Raises TrainError, EngineError."""
        self._deaths = 0

        async def once(process: int) -> None:
            if process != trained.process:
                async with self._restart_lock:
                    await self._catch_up()
            elif not trained.result.skipped:
                await self._publisher.publish(trained.result.version)

        await self._until_done(once)

    async def _until_done(self, work: Callable[[int], Awaitable[T]]) -> T:
        """Return `work(number of the process)`, done again in a new process if the learner dies."""
        async with self._learner.working():
            while True:
                process = await self.ready()
                try:
                    return await work(process)
                except (TrainError, EngineError):
                    if not await self.replace_dead(process):
                        raise

    async def _restart(self) -> None:
        self._weights_ready = False
        while not self._weights_ready:
            try:
                if not self._learner.alive:
                    await self._replace()
                elif self._replaying:
                    await self._learner.restart()
                await self._catch_up()
                self._process += 1
                if self._learner.hosts:
                    self._say(self._learner.hosts)
                self._weights_ready = True
            except (TrainError, EngineError):
                if self._learner.alive or self._deaths >= self._restarts:
                    raise

    async def _replace(self) -> None:
        cause = await self._learner.death()
        if self._deaths >= self._restarts:
            raise cause
        self._deaths += 1
        self._say(f"{cause}; restarting it ({self._deaths} of {self._restarts})")
        try:
            await self._learner.restart()
        except asyncio.CancelledError:
            self._deaths -= 1  # the waiter was cancelled: not a death
            raise

    async def _catch_up(self) -> None:
        """Load or repeat the last committed step, and publish its weights."""
        steps = await self._load()
        for again in steps:
            if again.version <= self._learner.version:
                continue  # the process replayed it before
            self._replaying = True
            async with self._publisher.training():
                await self._learner.step(again.plan())
            if again.weights not in ("", self._learner.weights):
                self._say(
                    f"step {again.step}: trained again after the last checkpoint, its weights differ from"
                    " those before: expected on a GPU or with other ranks, else the machine or a library has"
                    " changed"
                )
        await self._publisher.publish(self._learner.version)
        self._replaying = False

    async def _load(self) -> Sequence[CommittedStep]:
        """Load the newest checkpoint whose files are whole; return the steps after it."""
        while True:
            folder, steps = self._committed()
            if folder is None:
                return steps
            try:
                await self._learner.load(folder)
                return steps
            except TrainError:
                if not self._learner.alive or not (moved := await asyncio.to_thread(set_aside, folder)):
                    raise
                self._say(moved)
