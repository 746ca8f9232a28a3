"""A user's engine that demonstrates: no probe, no logprobs, and it keeps to what it says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from insitu.chat.load import load_renderer
from insitu.config import WARM_START, Config, load_config
from insitu.engines.base import Engine, TracksSessions
from insitu.engines.factory import open_engine
from insitu.engines.guarded import GuardedEngine
from insitu.errors import EngineError
from insitu.types import Generation, IntArray, Message, RequestKey, SamplingParams
from insitu_train.demo.scripted import ScriptedEngine

KEY = RequestKey(seed=0, rollout_id="a", turn=0)
PARAMS = SamplingParams(max_tokens=64, temperature=1.0, stop_ids=frozenset())
PROMPT = np.array([1, 2, 3], np.int32)
RENDERER = load_renderer(WARM_START)


def engine(*, sampled: bool = False) -> ScriptedEngine:
    return ScriptedEngine(
        RENDERER, lambda ids, key: Message(role="assistant", text="done " * 40), sampled=sampled
    )


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Engine]:
    yield engine()


async def test_a_scripted_engine_is_opened_without_the_probe_of_its_logprobs() -> None:
    config = load_config(None, [f"engine.kind={__file__}:opened"])
    async with open_engine(config, RENDERER) as found:
        reply = await found.generate(PROMPT, PARAMS, KEY)
    assert reply.logprobs is None
    assert len(reply.ids) > 32


async def test_its_other_rules_hold() -> None:
    class Long(ScriptedEngine):
        async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
            reply = await super().generate(ids, params, key)
            return replace(reply, ids=np.tile(reply.ids, 3))

    long = Long(RENDERER, lambda ids, key: Message(role="assistant", text="done " * 40))
    with pytest.raises(EngineError, match="tokens where 1 to 64 were asked for"):
        await GuardedEngine(long, "mine").generate(PROMPT, PARAMS, KEY)


@pytest.mark.parametrize("sampled", [True, False])
async def test_logprobs_are_there_as_the_engine_says(*, sampled: bool) -> None:
    class Other(ScriptedEngine):
        async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
            return await engine(sampled=not sampled).generate(ids, params, key)

    other = Other(RENDERER, lambda ids, key: Message(role="assistant", text="done"), sampled=sampled)
    wanted = "with" if sampled else "without"
    with pytest.raises(EngineError, match=f"^engine.kind mine: generate returned no Generation {wanted} log"):
        await GuardedEngine(other, "mine").generate(PROMPT, PARAMS, KEY)


async def test_one_that_keeps_something_for_each_session_is_told_of_their_ends() -> None:
    """`isinstance` of a protocol does not see `__getattr__` from Python 3.12 on."""
    ended: list[str] = []

    class Keeps(ScriptedEngine):
        def release(self, session: str) -> None:
            ended.append(session)

    keeps = Keeps(RENDERER, lambda ids, key: Message(role="assistant", text="done"))
    for own in (keeps, engine()):
        guarded = GuardedEngine(own, "mine")
        if isinstance(guarded, TracksSessions):
            guarded.release("a")
    assert ended == ["a"]
