"""What every Engine keeps, whoever samples behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from engine_labs import LABS, Lab, real_vllm

from insitu.engines.probe import probe_engine
from insitu.errors import EngineError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


REAL = pytest.param("vllm", marks=pytest.mark.full)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[*LABS, REAL])
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    if request.param == "vllm":
        opening = real_vllm(request.getfixturevalue("real_vllm").url)
    else:
        opening = LABS[request.param]()
    async with opening as opened:
        yield opened


def key(turn: int, rollout_id: str = "contract") -> RequestKey:
    return RequestKey(seed=3, rollout_id=rollout_id, turn=turn)


async def ask(
    lab: Lab,
    turn: int,
    max_tokens: int = 8,
    *,
    temperature: float = 1.0,
    stop: frozenset[int] = frozenset(),
    prompt: IntArray | None = None,
) -> Generation:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=stop)
    async with asyncio.timeout(60):
        return await lab.engine.generate(lab.prompt if prompt is None else prompt, params, key(turn))


@pytest.mark.parametrize("max_tokens", [1, 2, 33])
async def test_ids_and_logprobs_belong_together(lab: Lab, max_tokens: int) -> None:
    said = await ask(lab, 0, max_tokens)
    assert said.ids.dtype == np.int32
    assert len(said.ids) == max_tokens
    assert said.finish == "length"
    assert 0 <= said.ids.min() <= said.ids.max() < lab.vocab_size
    assert said.logprobs is not None
    assert said.logprobs.dtype == np.float32
    assert said.logprobs.shape == said.ids.shape
    assert np.isfinite(said.logprobs).all()
    assert (said.logprobs <= 0).all()
    assert said.version_runs == ((0, lab.engine.receipt.version),)


async def test_the_stop_id_is_kept_and_ends_the_reply(lab: Lab) -> None:
    free = await ask(lab, 1, 16)
    place = 5
    stop = int(free.ids[place])
    first = int(np.flatnonzero(free.ids == stop)[0])
    said = await ask(lab, 1, 16, stop=frozenset({stop, lab.vocab_size - 1}))
    assert said.finish == "stop"
    assert said.ids.tolist() == free.ids[: first + 1].tolist()
    assert said.logprobs is not None
    assert len(said.logprobs) == first + 1


async def test_a_key_names_its_draws(lab: Lab) -> None:
    # Hot: at temperature 1 a trained model may be so sure that two draws agree.
    one, again, other = [await ask(lab, turn, 24, temperature=2.0) for turn in (2, 2, 3)]
    assert one.ids.tolist() == again.ids.tolist()
    assert one.ids.tolist() != other.ids.tolist()
    assert one.logprobs is not None
    assert again.logprobs is not None
    assert np.allclose(one.logprobs, again.logprobs, atol=1e-5)


async def test_requests_at_the_same_time_do_not_mix(lab: Lab) -> None:
    alone = [await ask(lab, turn, 12) for turn in range(10, 18)]
    together = await asyncio.gather(*(ask(lab, turn, 12) for turn in range(10, 18)))
    for one, other in zip(alone, together, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)


async def test_the_prompt_decides(lab: Lab) -> None:
    if not lab.sampled:
        return
    changed = lab.prompt.copy()
    changed[-1] += 1
    one, other = await ask(lab, 4, 24), await ask(lab, 4, 24, prompt=changed)
    assert one.logprobs is not None
    assert other.logprobs is not None
    assert one.ids.tolist() != other.ids.tolist() or not np.allclose(one.logprobs, other.logprobs)


async def test_a_cancelled_request_leaves_a_working_engine(lab: Lab) -> None:
    task = asyncio.create_task(ask(lab, 5, 512))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.done()
    assert len((await ask(lab, 6, 4)).ids) == 4


async def test_pause_lets_run_what_runs_and_holds_what_comes(lab: Lab) -> None:
    if not lab.pauses:
        return
    running = asyncio.create_task(ask(lab, 7, 8))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        await lab.engine.pause()
    held = asyncio.create_task(ask(lab, 8, 4))
    assert len((await running).ids) == 8
    done, _ = await asyncio.wait([held], timeout=0.3)
    assert not done
    await lab.engine.resume()
    assert len((await held).ids) == 4


async def test_an_id_outside_the_vocabulary_is_refused(lab: Lab) -> None:
    if not lab.sampled:
        return
    with pytest.raises(EngineError):
        await ask(lab, 9, prompt=np.array([1, lab.vocab_size + 7], dtype=np.int32))
    assert len((await ask(lab, 9, 4)).ids) == 4


async def test_the_probe_says_what_it_is(lab: Lab) -> None:
    probe = probe_engine(lab.engine, lab.prompt, vocab_size=lab.vocab_size, temperature=0.7, deadline_s=60)
    if not lab.sampled:
        with pytest.raises(EngineError, match="refused by the start-up probe"):
            await probe
        return
    report = await probe
    assert report.pairs > 0
    assert report.repeatable
    assert report.largest_gap < 1e-4
    assert report.version == lab.engine.receipt.version
