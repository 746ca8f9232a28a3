"""The engines that the contract is run over, each with what its tests need to know of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from whet.config import WARM_START
from whet.engine.base import Engine
from whet.engine.http import HttpOptions
from whet.engine.sglang import open_sglang
from whet.engine.vllm import open_vllm
from whet.render.template import load_family
from whet.testing.fake_sglang import serve_sglang
from whet.testing.fake_vllm import serve_vllm
from whet.testing.scripted_engine import ScriptedEngine
from whet.train.client import Learner, LearnerSpec
from whet.types import IntArray, RequestKey

VOCAB = 448
"""Of the warm start; the fakes take the same."""
PROMPT: IntArray = np.array([1, 40, 41, 42, 43, 44, 45, 46], dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """One live engine under test."""

    engine: Engine
    sampled: bool = True
    """It draws at random and has logprobs of its own; a scripted policy does not."""
    pauses: bool = True
    vocab_size: int = VOCAB
    prompt: IntArray = field(default_factory=lambda: PROMPT)


Open = Callable[[], AbstractAsyncContextManager[Lab]]


@asynccontextmanager
async def embedded() -> AsyncIterator[Lab]:
    async with Learner.start(LearnerSpec(model=WARM_START)) as learner:
        yield Lab(engine=learner.engine)


@asynccontextmanager
async def scripted() -> AsyncIterator[Lab]:
    def policy(ids: IntArray, key: RequestKey) -> IntArray:
        return np.random.default_rng([key.turn, len(key.rollout_id)]).integers(50, VOCAB, size=64)

    family = load_family(Path(WARM_START))
    engine = ScriptedEngine(family, policy, uniform_logprobs=True, max_context_tokens=2048)
    yield Lab(engine=engine, sampled=False)


@asynccontextmanager
async def fake_vllm(scale_out: bool = True) -> AsyncIterator[Lab]:
    async with (
        serve_vllm(VOCAB, scale_out=scale_out) as fake,
        open_vllm(HttpOptions(url=fake.url, call_deadline_s=20.0)) as engine,
    ):
        yield Lab(engine=engine)


@asynccontextmanager
async def fake_sglang() -> AsyncIterator[Lab]:
    async with (
        serve_sglang(VOCAB) as fake,
        open_sglang(HttpOptions(url=fake.url, call_deadline_s=20.0)) as engine,
    ):
        yield Lab(engine=engine)


LABS: dict[str, Open] = {
    "embedded": embedded,
    "scripted": scripted,
    "vllm-generate-fake": fake_vllm,
    "vllm-completions-fake": lambda: fake_vllm(scale_out=False),
    "sglang-fake": fake_sglang,
}
