"""The SGLang engine against the shipped fake, which follows SGLang's documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.engines.http import HttpOptions
from insitu.engines.probe import probe_engine
from insitu.engines.sglang import open_sglang
from insitu.errors import EngineError
from insitu.types import IntArray, RequestKey, SamplingParams
from tests.fakes.sglang import FakeSglang, serve_sglang
from tests.fakes.weight_folders import chance_folder

VOCAB = 97
PROMPT: IntArray = np.array([1, 2, 3, 4, 5, 6], dtype=np.int32)
KEY = RequestKey(seed=1, rollout_id="r/0", turn=0)


def options(fake: FakeSglang, **changes: Any) -> HttpOptions:
    return HttpOptions(url=fake.url, **{"call_deadline_s": 10.0, "control_deadline_s": 5.0, **changes})


def params(max_tokens: int = 8, temperature: float = 1.0, *stop: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=frozenset(stop))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def weights(folder: Path, content: bytes) -> Path:
    return chance_folder(folder, content.decode())


async def test_what_the_server_is_asked() -> None:
    async with serve_sglang(VOCAB) as fake, open_sglang(options(fake)) as engine:
        said = await engine.generate(PROMPT, params(5, 0.7, 9, 3), KEY)
        job = fake.sampler.received[-1]
        assert job.prompt == PROMPT.tolist()
        assert (job.max_tokens, job.temperature, job.stop_ids) == (5, 0.7, {3, 9})
        assert said.ids.tolist() == job.ids
        assert said.logprobs is not None
        assert np.allclose(said.logprobs, job.processed)


async def test_a_stop_id_that_only_the_logprobs_show() -> None:
    async with serve_sglang(VOCAB, trims_stop=True) as fake, open_sglang(options(fake)) as engine:
        free = await engine.generate(PROMPT, params(8), KEY)
        stop = int(free.ids[3])
        said = await engine.generate(PROMPT, params(8, 1.0, stop), KEY)
        assert said.finish == "stop"
        assert said.ids.tolist() == free.ids[: free.ids.tolist().index(stop) + 1].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_the_probe_refuses_original_logprobs(temperature: float) -> None:
    async with serve_sglang(VOCAB, processed=False) as fake, open_sglang(options(fake)) as engine:
        with pytest.raises(EngineError, match="not those of the distribution"):
            await probe_engine(engine, PROMPT, vocab_size=VOCAB, temperature=temperature, deadline_s=10)


Meta = dict[str, Any]
FAULTS: dict[str, tuple[Callable[[Meta], object], str]] = {
    "short": (lambda m: m["output_token_logprobs"].pop(), "8 tokens, but 7 logprobs"),
    "none": (lambda m: m.pop("output_token_logprobs"), "no logprobs"),
    "missing": (lambda m: m["output_token_logprobs"][2].__setitem__(0, None), "logprob 2 is None"),
    "positive": (lambda m: m["output_token_logprobs"][2].__setitem__(0, 0.1), "no sampled token can have"),
    "of-others": (lambda m: m["output_token_logprobs"][2].__setitem__(1, 96), "those of other ids"),
    "prompt": (lambda m: m.update(prompt_tokens=5), "5 prompt tokens where 6 were sent"),
    "version": (lambda m: m.update(weight_version="7"), "sampled by version 7, while version 0 is held"),
    "label": (lambda m: m.update(weight_version="theirs"), "no publication of ours"),
    "aborted": (lambda m: m.update(finish_reason={"type": "abort", "message": "full"}), "aborted.*full"),
}


@pytest.mark.case(45)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_reply_that_cannot_be_trusted_is_an_engine_error(name: str) -> None:
    spoil, line = FAULTS[name]

    def corrupt(answer: dict[str, Any]) -> object:
        spoil(answer["meta_info"])
        return answer

    async with serve_sglang(VOCAB) as fake, open_sglang(options(fake)) as engine:
        fake.corrupt = corrupt
        with pytest.raises(EngineError, match=line):
            await engine.generate(PROMPT, params(), KEY)


async def test_a_server_that_changes_the_prompt_is_refused_at_once() -> None:
    def corrupt(answer: dict[str, Any]) -> object:
        answer["meta_info"]["input_token_logprobs"].insert(0, [None, 0, None])
        return answer

    async with serve_sglang(VOCAB, corrupt=corrupt) as fake:
        with pytest.raises(EngineError, match="other prompt ids"):
            async with open_sglang(options(fake)):
                pass


@pytest.mark.case(46)
async def test_a_restart_in_the_middle_of_a_call(tmp_path: Path) -> None:
    async with serve_sglang(VOCAB, token_delay_s=0.02) as fake, open_sglang(options(fake)) as engine:
        await engine.load(weights(tmp_path / "a", b"a"), 4)
        call = asyncio.create_task(engine.generate(PROMPT, params(200), KEY))
        await until(lambda: fake.sampler.jobs)
        fake.restart()
        with pytest.raises(EngineError, match="closed the connection"):
            await call
        with pytest.raises(EngineError, match="'default', which no publication of ours set"):
            await engine.generate(PROMPT, params(), KEY)


@pytest.mark.case(42)
async def test_cancelling_aborts_at_the_server() -> None:
    async with serve_sglang(VOCAB, token_delay_s=0.02) as fake, open_sglang(options(fake)) as engine:
        call = asyncio.create_task(engine.generate(PROMPT, params(1000), KEY))
        await until(lambda: fake.sampler.jobs)
        call.cancel()
        await asyncio.wait([call], timeout=5)
        assert call.cancelled()
        await until(lambda: not fake.sampler.jobs)
        assert fake.sampler.aborted


async def test_loaded_weights_are_stamped(tmp_path: Path) -> None:
    async with serve_sglang(VOCAB) as fake, open_sglang(options(fake)) as engine:
        before = await engine.generate(PROMPT, params(), KEY)
        receipt = await engine.load(weights(tmp_path / "a", b"one"), 1)
        assert receipt.version == 1 == await engine.version()
        assert fake.sampler.flushes == 1
        after = await engine.generate(PROMPT, params(), KEY)
        assert after.version_runs == ((0, 1),)
        assert after.ids.tolist() != before.ids.tolist()
        fake.loads_fail = True
        with pytest.raises(EngineError, match="iterator"):
            await engine.load(weights(tmp_path / "b", b"two"), 2)
        assert engine.receipt == receipt
        fake.loads_fail = False
        assert (await engine.load(tmp_path / "b", 2)).checksum != receipt.checksum


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_pause_modes(mode: Any) -> None:
    async with serve_sglang(VOCAB, token_delay_s=0.01) as fake, open_sglang(options(fake)) as engine:
        call = asyncio.create_task(engine.generate(PROMPT, params(60), KEY))
        await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 2)
        await engine.pause(mode)
        assert fake.sampler.paused
        if mode == "abort":
            with pytest.raises(EngineError, match="aborted"):
                await call
            return
        assert bool((await asyncio.wait([call], timeout=0.2))[0]) == (mode == "wait")
        await engine.resume()
        assert len((await call).ids) == 60


async def test_a_call_that_an_update_cuts_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    """Every token has the logprob of the model that sampled it, and says which that was."""
    folder = weights(tmp_path, b"one")
    async with serve_sglang(VOCAB, token_delay_s=0.01) as fake, open_sglang(options(fake)) as engine:
        old = fake.sampler.model
        call = asyncio.create_task(engine.generate(PROMPT, params(60), KEY))
        await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 2)
        await engine.load(folder, 1, mode="keep")
        said = await call
        (start, first), (change, second) = said.version_runs
        assert (start, first, second, len(said.ids)) == (0, 0, 1, 60)
        assert change > 2
        assert said.logprobs is not None
        seen = [*PROMPT.tolist(), *said.ids.tolist()]
        for at, token in enumerate(said.ids.tolist()):
            model = old if at < change else fake.sampler.model
            row = model.logprobs(seen[: len(PROMPT) + at], 1.0)
            assert said.logprobs[at] == pytest.approx(float(row[token]), abs=1e-5)


async def test_a_sleep_may_outlast_the_time_of_a_call() -> None:
    async with serve_sglang(VOCAB) as fake, open_sglang(options(fake, call_deadline_s=0.2)) as engine:
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(PROMPT, params(3), KEY))
        assert not (await asyncio.wait([waiting], timeout=0.4))[0]
        await engine.wake()
        assert len((await waiting).ids) == 3


async def test_sleep_drains_first() -> None:
    async with serve_sglang(VOCAB, token_delay_s=0.005) as fake, open_sglang(options(fake)) as engine:
        running = asyncio.create_task(engine.generate(PROMPT, params(30), KEY))
        await until(lambda: fake.sampler.jobs)
        await engine.sleep()
        assert fake.sleeping
        assert len((await running).ids) == 30
        await engine.wake()
        assert not fake.sleeping
        assert len((await engine.generate(PROMPT, params(3), KEY)).ids) == 3
