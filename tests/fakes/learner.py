"""A learner without torch and without a process: weights are a digest of everything trained.

Stands in for the learner's client where deaths and restarts are under test. It dies where `dies_at` says: the
n-th call of `step`, `saved` (after the checkpoint is written), `load`, `publish` or `generate`, counted over
all its lives. What is asked of it while it is dead fails as with the real one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from insitu.engines.base import EngineInfo, Receipt
from insitu.errors import EngineError, TrainError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_train.options import StepResult
from insitu_train.plan.step import StepPlan

_START = "start"


class FakeLearner:
    """Implements train.lifeline.Mortal, engines.base.Engine and training.weights.Publisher."""

    def __init__(self, dies_at: Collection[tuple[str, int]] = ()) -> None:
        self.alive, self.version, self.weights = True, 0, _START
        self.lives = 1
        self.published = Receipt(version=0, checksum=_START)
        self._dies_at = frozenset(dies_at)
        self._disk: dict[Path, tuple[int, str]] = {}
        self._calls: Counter[str] = Counter()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="fake", max_context_tokens=128)

    @property
    def receipt(self) -> Receipt:
        return self.published

    async def death(self) -> EngineError:
        return EngineError("the learner died (killed by signal 9)")

    async def restart(self) -> None:
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
        return self.published

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        await self._asked("generate", EngineError)
        text = f"{self.published.checksum} {key.seed} {key.rollout_id} {key.turn}"
        drawn = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)[: params.max_tokens]
        return Generation(
            ids=drawn.astype(np.int32),
            logprobs=np.full(len(drawn), -1.0, np.float32),
            finish="length",
            version_runs=((0, self.published.version),),
        )

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...

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
