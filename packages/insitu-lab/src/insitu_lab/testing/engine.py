"""Contract of an engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from insitu.engines.base import Engine
from insitu.engines.probe import probe_engine
from insitu.errors import EngineError
from insitu.stalls import awake_timeout
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

DEADLINE_S = 60.0


def request_key(turn: int) -> RequestKey:
    return RequestKey(seed=3, rollout_id="contract", turn=turn)


@pytest.mark.asyncio(loop_scope="module")
class EngineContract:
    """Subclass it and define the fixture `engine`, an open `Engine`, on the event loop of the module.

    Example:

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self):
        async with open_my_engine() as engine:
            yield engine
    """

    vocab_size: int
    """Number of token ids of the model."""
    prompt: tuple[int, ...] = (1, 40, 41, 42, 43, 44, 45, 46)
    """Ids of a prompt, all below `vocab_size` - 1."""
    scripted: bool = False
    """The engine returns given replies: prompts need not matter, and the start-up probe must refuse it."""

    def prompt_ids(self) -> IntArray:
        return np.array(self.prompt, dtype=np.int32)

    async def generate(
        self,
        engine: Engine,
        turn: int,
        max_tokens: int = 8,
        *,
        temperature: float = 1.0,
        stop: frozenset[int] = frozenset(),
        prompt: IntArray | None = None,
    ) -> Generation:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=stop)
        ids = self.prompt_ids() if prompt is None else prompt
        async with awake_timeout(DEADLINE_S):
            return await engine.generate(ids, params, request_key(turn))

    @pytest.mark.parametrize("max_tokens", [1, 2, 33])
    async def test_each_id_has_a_logprob(self, engine: Engine, max_tokens: int) -> None:
        reply = await self.generate(engine, 0, max_tokens)
        assert reply.ids.dtype == np.int32
        assert len(reply.ids) == max_tokens
        assert reply.finish == "length"
        assert 0 <= reply.ids.min() <= reply.ids.max() < self.vocab_size
        assert reply.logprobs is not None
        assert reply.logprobs.dtype == np.float32
        assert reply.logprobs.shape == reply.ids.shape
        assert np.isfinite(reply.logprobs).all()
        assert (reply.logprobs <= 0).all()
        assert reply.version_runs == ((0, engine.receipt.version),)

    async def test_the_stop_id_is_kept_and_ends_the_reply(self, engine: Engine) -> None:
        free = await self.generate(engine, 1, 16)
        stop = int(free.ids[5])
        first = int(np.flatnonzero(free.ids == stop)[0])
        reply = await self.generate(engine, 1, 16, stop=frozenset({stop, self.vocab_size - 1}))
        assert reply.finish == "stop"
        assert reply.ids.tolist() == free.ids[: first + 1].tolist()
        assert reply.logprobs is not None
        assert len(reply.logprobs) == first + 1

    async def test_the_request_key_seeds_the_draw(self, engine: Engine) -> None:
        # At temperature 1 a trained model may be so certain that two draws agree.
        first, repeated, other = [
            await self.generate(engine, turn, 24, temperature=2.0) for turn in (2, 2, 3)
        ]
        assert first.ids.tolist() == repeated.ids.tolist()
        assert first.ids.tolist() != other.ids.tolist()
        assert first.logprobs is not None
        assert repeated.logprobs is not None
        assert np.allclose(first.logprobs, repeated.logprobs, atol=1e-5)

    async def test_concurrent_requests_do_not_mix(self, engine: Engine) -> None:
        alone = [await self.generate(engine, turn, 12) for turn in range(10, 18)]
        together = await asyncio.gather(*(self.generate(engine, turn, 12) for turn in range(10, 18)))
        for one, other in zip(alone, together, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)

    async def test_the_reply_depends_on_the_prompt(self, engine: Engine) -> None:
        if self.scripted:
            return
        changed = self.prompt_ids()
        changed[-1] += 1
        one = await self.generate(engine, 4, 24)
        other = await self.generate(engine, 4, 24, prompt=changed)
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.ids.tolist() != other.ids.tolist() or not np.allclose(one.logprobs, other.logprobs)

    async def test_the_engine_works_after_a_cancelled_request(self, engine: Engine) -> None:
        task = asyncio.create_task(self.generate(engine, 5, 512))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.done()
        assert len((await self.generate(engine, 6, 4)).ids) == 4

    async def test_pause_finishes_running_requests_and_holds_new_ones(self, engine: Engine) -> None:
        running = asyncio.create_task(self.generate(engine, 7, 8))
        await asyncio.sleep(0.01)
        async with awake_timeout(DEADLINE_S):
            await engine.pause()
        waiting = asyncio.create_task(self.generate(engine, 8, 4))
        try:
            assert len((await running).ids) == 8
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
        finally:  # the next test has the same engine
            await engine.resume()
        assert len((await waiting).ids) == 4

    async def test_an_id_outside_the_vocabulary_is_refused(self, engine: Engine) -> None:
        if self.scripted:
            return
        with pytest.raises(EngineError):
            await self.generate(engine, 9, prompt=np.array([1, self.vocab_size + 7], dtype=np.int32))
        assert len((await self.generate(engine, 9, 4)).ids) == 4

    async def test_the_start_up_probe(self, engine: Engine) -> None:
        probe = probe_engine(
            engine, self.prompt_ids(), vocab_size=self.vocab_size, temperature=0.7, deadline_s=DEADLINE_S
        )
        if self.scripted:
            with pytest.raises(EngineError, match="refused by the start-up probe"):
                await probe
            return
        report = await probe
        assert report.pairs > 0
        assert report.repeatable
        assert report.largest_gap < 1e-4
        assert report.version == engine.receipt.version
