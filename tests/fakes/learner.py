"""A learner without torch and without a process: weights are a digest of everything trained.

Stands in for the learner's client where deaths and restarts are under test. It dies where `dies_at` says: the
n-th call of `step`, `saved` (after the checkpoint is written), `load`, `publish` or `generate`, counted over
all its lives. What is asked of it while it is dead fails as with the real one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from insitu.engines.base import EngineInfo, Receipt
from insitu.errors import EngineError, TrainError
from insitu.types import Generation
from insitu.types.codec import VALUES
from insitu_train.channel.calls import read_request
from insitu_train.channel.rpc import Array, Frame, Meta
from insitu_train.learner.engine import LearnerEngine
from insitu_train.options import StepResult
from insitu_train.plan.step import StepPlan

_START = "start"


class FakeLearner:
    """Implements what a supervisor uses of `Learner`, a `Publisher`, and the channel of its engine."""

    def __init__(self, dies_at: Collection[tuple[str, int]] = ()) -> None:
        self.alive, self.version, self.weights = True, 0, _START
        self.lives = 1
        self.hosts = self.waiting = ""
        self.published = Receipt(version=0, checksum=_START)
        self._dies_at = frozenset(dies_at)
        self._disk: dict[Path, tuple[int, str]] = {}
        self._calls: Counter[str] = Counter()
        info = EngineInfo(name="fake", max_context_tokens=128)
        self.engine = LearnerEngine(cast(Any, self), self._explained, info, self.published, 60.0)

    def working(self) -> AbstractAsyncContextManager[None]:
        return self.engine.working()

    async def death(self) -> EngineError:
        return EngineError("the learner died (killed by signal 9)")

    async def _explained(self, error: EngineError) -> EngineError:
        return error if self.alive else await self.death()

    async def restart(self) -> None:
        self.engine.fed = False
        await asyncio.sleep(0)
        self.alive, self.version, self.weights = True, 0, _START
        self.published = Receipt(version=0, checksum=_START)
        self.lives += 1

    async def step(self, plan: StepPlan, scores: Path | None = None) -> StepResult:
        await self._asked("step", TrainError)
        self.weights = hashlib.sha256(f"{self.weights} {plan.digest}".encode()).hexdigest()
        self.version += 1
        return StepResult(optimizer_steps=self.version, version=self.version)

    async def save(self, folder: Path) -> str:
        await self._asked("save", TrainError)
        self._disk[folder] = (self.version, self.weights)
        await self._asked("saved", TrainError)
        return ""

    async def written(self) -> str:
        await self._asked("written", TrainError)
        return ""

    async def load(self, folder: Path) -> None:
        await self._asked("load", TrainError)
        self.version, self.weights = self._disk[folder]

    async def publish(self, version: int) -> Receipt:
        await self._asked("publish", TrainError)
        if version != self.version:
            raise TrainError(f"version {version} is not the trainer's, which is {self.version}")
        self.published = Receipt(version=version, checksum=self.weights)
        return await self.engine.recognise()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    async def call(
        self, op: str, meta: Meta | None, arrays: Mapping[str, Array], *, deadline_s: float, quiet_s: float
    ) -> Frame:
        """Answer the engine's calls as the process does."""
        if op == "engine.info":
            return Frame(
                meta={"version": self.published.version, "checksum": self.published.checksum}, arrays={}
            )
        assert op == "engine.generate"
        await self._asked("generate", EngineError)
        _, params, key = read_request(arrays)
        text = f"{self.published.checksum} {key.seed} {key.rollout_id} {key.turn}"
        drawn = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)[: params.max_tokens]
        made = Generation(
            ids=drawn.astype(np.int32),
            logprobs=np.full(len(drawn), -1.0, np.float32),
            finish="length",
            version_runs=((0, self.published.version),),
        )
        return Frame(meta={}, arrays=VALUES.pack(made))

    def _call(self, name: str) -> None:
        self._calls[name] += 1
        if (name, self._calls[name]) in self._dies_at:
            self.alive = False

    async def _asked(self, name: str, kind: type[EngineError] | type[TrainError]) -> None:
        life = self.lives
        if self.alive:
            self._call(name)
            await asyncio.sleep(0)
        if not self.alive or self.lives != life:
            raise kind("the learner died (killed by signal 9)")
