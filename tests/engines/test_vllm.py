"""The vLLM engine against the shipped fake: wire, faults, control plane (tests/full has the real server)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.engines.http import HttpOptions
from insitu.engines.probe import probe_engine
from insitu.engines.safetensors_file import write_tensors
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.errors import ConfigError, EngineError, EngineUnavailable
from insitu.types import IntArray, RequestKey, SamplingParams
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import chance_folder, chance_tensors

VOCAB = 97
PROMPT: IntArray = np.array([1, 2, 3, 4, 5, 6], dtype=np.int32)
KEY = RequestKey(seed=1, rollout_id="r/0", turn=0)


def options(fake: FakeVllm, **changes: Any) -> HttpOptions:
    return HttpOptions(url=fake.url, **{"call_deadline_s": 10.0, "control_deadline_s": 5.0, **changes})


def params(max_tokens: int = 8, temperature: float = 1.0, *stop: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=frozenset(stop))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def probe(engine: VllmEngine, temperature: float) -> None:
    await probe_engine(engine, PROMPT, vocab_size=VOCAB, temperature=temperature, deadline_s=10)


def weights(folder: Path, content: bytes) -> Path:
    return chance_folder(folder, content.decode())


# --------------------------------------------------------------------------- what is sent


async def test_what_the_server_is_asked() -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake, key="hush")) as engine:
        await engine.generate(PROMPT, params(5, 0.7, 9, 3), KEY)
        await engine.generate(PROMPT, params(), RequestKey(seed=1, rollout_id="r/0", turn=1))
        await engine.generate(PROMPT, params(), RequestKey(seed=1, rollout_id="r/1", turn=0))
        job, later, other = fake.sampler.received[-3:]
        assert job.prompt == PROMPT.tolist()
        assert (job.max_tokens, job.temperature, job.stop_ids) == (5, 0.7, {3, 9})
        assert len({job.seed, later.seed, other.seed}) == 3
        sticky = [headers["X-Session-ID"] for headers in fake.headers[-3:]]
        assert sticky[0] == sticky[1] != sticky[2]
        assert len({headers["X-Request-Id"] for headers in fake.headers[-3:]}) == 3
        assert fake.headers[-1]["Authorization"] == "Bearer hush"


@pytest.mark.parametrize("scale_out", [True, False])
async def test_the_route_follows_what_the_server_offers(scale_out: bool) -> None:
    async with serve_vllm(VOCAB, scale_out=scale_out) as fake, open_vllm(options(fake)) as engine:
        assert engine.server.route == ("generate" if scale_out else "completions")
        said = await engine.generate(PROMPT, params(), KEY)
        assert said.ids.tolist() == fake.sampler.received[-1].ids
        assert said.logprobs is not None
        assert np.allclose(said.logprobs, fake.sampler.received[-1].processed)


# --------------------------------------------------------------------------- the probe


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("scale_out", [True, False])
async def test_the_probe_tells_raw_from_processed_logprobs(temperature: float, scale_out: bool) -> None:
    async with serve_vllm(VOCAB, scale_out=scale_out) as fake, open_vllm(options(fake)) as engine:
        await probe(engine, temperature)
        fake.processed = False
        with pytest.raises(EngineError, match="processed_logprobs") as caught:
            await probe(engine, temperature)
        assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------- faults

Choice = dict[str, Any]


def _one_more(choice: Choice) -> None:
    choice["token_ids"].append(5)
    choice["logprobs"]["content"].append({"token_id": 5, "logprob": -1.0})
    choice["weight_versions"][0]["end"] += 1


FAULTS: dict[str, tuple[Callable[[Choice], object], str]] = {
    "short": (lambda c: c["logprobs"]["content"].pop(), "logprobs are those of other ids"),
    "none": (lambda c: c.update(logprobs=None), "no logprobs"),
    "missing": (lambda c: c["logprobs"]["content"][1].update(logprob=None), "logprob 1 is None"),
    "sentinel": (lambda c: c["logprobs"]["content"][1].update(logprob=-9999.0), "no sampled token can have"),
    "positive": (lambda c: c["logprobs"]["content"][0].update(logprob=0.5), "no sampled token can have"),
    "of-others": (lambda c: c["logprobs"]["content"][0].update(token_id=96), "those of other ids"),
    "extra": (_one_more, "9 tokens where 1 to 8"),
    "negative": (lambda c: c["token_ids"].__setitem__(0, -3), "other ids|not a token id"),
    "text": (lambda c: c.update(token_ids="abc"), "missing|other ids"),
    "empty": (lambda c: c.update(token_ids=[], logprobs={"content": []}, weight_versions=[]), "0 tokens"),
    "no-versions": (lambda c: c.update(weight_versions=None), "no weight versions"),
    "gap": (lambda c: c["weight_versions"][0].update(start=1), "do not cover"),
    "short-span": (lambda c: c["weight_versions"][0].update(end=2), "cover 2 of 8"),
    "unknown": (lambda c: c["weight_versions"][0].update(version="theirs"), "no publication of ours"),
    "aborted": (lambda c: c.update(finish_reason="abort"), "aborted"),
    "odd-finish": (lambda c: c.update(finish_reason="content_filter"), "finish reason"),
    "false-stop": (lambda c: c.update(finish_reason="stop"), "not a stop id of this request"),
}


@pytest.mark.case(45)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_reply_that_cannot_be_trusted_is_an_engine_error(name: str) -> None:
    spoil, line = FAULTS[name]

    def corrupt(answer: dict[str, Any]) -> object:
        spoil(answer["choices"][0])
        return answer

    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        fake.corrupt = corrupt
        with pytest.raises(EngineError, match=line):
            await engine.generate(PROMPT, params(), KEY)
        fake.corrupt = None
        assert len((await engine.generate(PROMPT, params(), KEY)).ids) == 8


ANSWERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other prompt": (lambda a: {**a, "prompt_token_ids": [1, 2, 3]}, "other prompt ids"),
    "no prompt": (
        lambda a: {k: v for k, v in a.items() if k != "prompt_token_ids"},
        "prompt ids are missing",
    ),
    "null prompt": (lambda a: {**a, "prompt_token_ids": None}, "prompt ids are missing"),
    "two choices": (lambda a: {**a, "choices": a["choices"] * 2}, "exactly one choice"),
    "no object": (lambda a: [a], "not an object"),
    "nan": (lambda a: b'{"choices": [{"logprobs": NaN}]}', "not JSON"),
    "cut": (lambda a: b'{"choices": [{"log', "not JSON"),
}


@pytest.mark.case(45)
@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_of_another_shape_is_an_engine_error(name: str) -> None:
    corrupt, line = ANSWERS[name]
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        fake.corrupt = corrupt
        with pytest.raises(EngineError, match=line):
            await engine.generate(PROMPT, params(), KEY)


def _without_prompt(choice: Choice) -> None:
    choice["prompt_token_ids"] = None


def _all_zero(choice: Choice) -> None:
    choice["logprobs"]["token_logprobs"] = [0.0] * len(choice["token_ids"])


@pytest.mark.case(45)
@pytest.mark.parametrize(
    ("spoil", "temperature", "line"),
    [
        (_without_prompt, 1.0, "prompt ids are missing"),
        (_all_zero, 1.0, "all 32 logprobs are 0"),
        (_all_zero, 0.1, ""),
    ],
)
async def test_a_completion_that_says_too_little(
    spoil: Callable[[Choice], None], temperature: float, line: str
) -> None:
    def corrupt(answer: dict[str, Any]) -> object:
        spoil(answer["choices"][0])
        return answer

    async with serve_vllm(VOCAB, scale_out=False) as fake, open_vllm(options(fake)) as engine:
        fake.corrupt = corrupt
        if not line:  # so cold that honest logprobs can all round to 0
            assert len((await engine.generate(PROMPT, params(32, temperature), KEY)).ids) == 32
            return
        with pytest.raises(EngineError, match=line):
            await engine.generate(PROMPT, params(32, temperature), KEY)


@pytest.mark.case(46)
async def test_a_restart_in_the_middle_of_a_call(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, token_delay_s=0.02) as fake, open_vllm(options(fake)) as engine:
        await engine.load(weights(tmp_path / "a", b"a"), 4)
        call = asyncio.create_task(engine.generate(PROMPT, params(200), KEY))
        await until(lambda: fake.sampler.jobs)
        fake.restart()
        with pytest.raises(EngineError, match="closed the connection"):
            await call
        # It came back with the weights it was started with: nothing of that is version 4.
        with pytest.raises(EngineError, match="'default', which no publication of ours set"):
            await engine.generate(PROMPT, params(), KEY)


@pytest.mark.case(46)
async def test_two_version_spans_are_kept_apart(tmp_path: Path) -> None:
    folder = chance_folder(tmp_path, "one")
    async with serve_vllm(VOCAB, token_delay_s=0.01) as fake, open_vllm(options(fake)) as engine:
        call = asyncio.create_task(engine.generate(PROMPT, params(40), KEY))
        await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) >= 5)
        await engine.load(folder, 1, mode="keep")
        said = await call
        (start, first), (change, second) = said.version_runs
        assert (start, first, second) == (0, 0, 1)
        assert change == fake.sampler.received[-1].labels.index("1") >= 5


async def test_a_version_without_a_receipt_is_refused() -> None:
    """Somebody else gave the server weights, or the label of some: nothing vouches for them."""
    async with serve_vllm(VOCAB, token_delay_s=0.01) as fake, open_vllm(options(fake)) as engine:
        fake.sampler.label = "1"
        with pytest.raises(EngineError, match="version 1, for which there is no receipt"):
            await engine.generate(PROMPT, params(4), KEY)


@pytest.mark.case(46)
async def test_a_route_without_versions_refuses_a_change_in_between() -> None:
    async with (
        serve_vllm(VOCAB, scale_out=False, token_delay_s=0.01) as fake,
        open_vllm(options(fake)) as engine,
    ):
        call = asyncio.create_task(engine.generate(PROMPT, params(40), KEY))
        await until(lambda: fake.sampler.jobs)
        fake.sampler.label = "1"
        with pytest.raises(EngineError, match="changed during the call"):
            await call


# --------------------------------------------------------------------------- waiting, retrying, giving up


@pytest.mark.case(42)
@pytest.mark.parametrize("scale_out", [True, False])
async def test_cancelling_aborts_at_the_server(scale_out: bool) -> None:
    async with (
        serve_vllm(VOCAB, scale_out=scale_out, token_delay_s=0.02) as fake,
        open_vllm(options(fake)) as engine,
    ):
        call = asyncio.create_task(engine.generate(PROMPT, params(1000), KEY))
        await until(lambda: fake.sampler.jobs)
        call.cancel()
        await asyncio.wait([call], timeout=5)
        assert call.cancelled()
        await until(lambda: not fake.sampler.jobs)
        assert fake.sampler.aborted
        assert len((await engine.generate(PROMPT, params(2), KEY)).ids) == 2


async def test_the_deadline_aborts_at_the_server() -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake, call_deadline_s=0.3)) as engine:
        fake.sampler.token_delay_s = 0.05
        with pytest.raises(EngineUnavailable, match=r"did not answer /inference/v1/generate within 0.3 s"):
            await engine.generate(PROMPT, params(1000), KEY)
        await until(lambda: not fake.sampler.jobs)


async def test_a_busy_server_is_asked_again_boundedly() -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake, retries=2)) as engine:
        begun = len(fake.sampler.received)
        fake.busy = 2
        assert len((await engine.generate(PROMPT, params(), KEY)).ids) == 8
        assert len(fake.sampler.received) == begun + 1
        fake.busy = 3
        with pytest.raises(EngineError, match="HTTP 503"):
            await engine.generate(PROMPT, params(), KEY)


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="not reachable") as caught:
        async with open_vllm(HttpOptions(url="http://127.0.0.1:9", retries=1)):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://u:p@x", "http://x?key=1", "", "http://", "http://x:99999"]
)
async def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="engine.urls"):
        async with open_vllm(HttpOptions(url=url)):
            pass


# --------------------------------------------------------------------------- weights


async def test_loaded_weights_are_stamped_and_proven(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        assert engine.receipt.version == 0
        before = await engine.generate(PROMPT, params(), KEY)
        receipt = await engine.load(weights(tmp_path / "a", b"one"), 1)
        assert receipt == engine.receipt
        assert receipt.version == 1 == await engine.version()
        assert fake.sampler.flushes == 1
        assert not fake.sampler.paused
        after = await engine.generate(PROMPT, params(), KEY)
        assert after.version_runs == ((0, 1),)
        assert after.ids.tolist() != before.ids.tolist()
        other = await engine.load(weights(tmp_path / "b", b"two"), 2)
        assert other.checksum != receipt.checksum
        again = await engine.load(weights(tmp_path / "c", b"one"), 3)
        assert again.checksum == receipt.checksum


async def test_a_reload_that_did_nothing_is_found_out(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        await engine.load(weights(tmp_path / "a", b"one"), 1)
        fake.loads_nothing = True
        with pytest.raises(EngineError, match="model.embed_tokens.weight still has its old weights"):
            await engine.load(weights(tmp_path / "b", b"two"), 2)


async def test_tied_weights_are_refused_where_tensors_are_packed(tmp_path: Path) -> None:
    tied = chance_folder(tmp_path / "a", "one")
    untied = chance_folder(tmp_path / "b", "two", tied=False)
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        assert (await engine.load(tied, 1)).version == 1
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        fake.packs = True
        with pytest.raises(EngineError, match="would keep the old output head"):
            await engine.load(tied, 1)
        fake.sums["lm_head.weight"] = "as it was"
        assert await engine.has_own_head()
        assert (await engine.generate(PROMPT, params(), KEY)).version_runs == ((0, 0),)
        assert (await engine.load(untied, 1)).version == 1


async def test_experts_are_refused_where_a_reload_leaves_them_unpacked(tmp_path: Path) -> None:
    """As vLLM 0.32 does on a CPU (tests/full/test_experts_with_vllm.py)."""
    tensors = chance_tensors("one", tied=False)
    matrix = tensors["model.layers.0.mlp.gate_proj.weight"]
    parts = [
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"
        for e in (0, 1)
        for part in ("gate", "up", "down")
    ]
    write_tensors(tmp_path / "model.safetensors", {**tensors, **dict.fromkeys(parts, matrix)})
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        held = {"lm_head.weight": "a head of its own"}
        held |= {
            f"model.layers.0.mlp.experts.routed_experts.{w}_weight": f"packed {w}" for w in ("w13", "w2")
        }
        fake.sums = {**fake.sums, **held}
        fake.packs = True
        with pytest.raises(
            EngineError, match=r"not its experts after a reload.*\.0\.mlp\.experts\.w13_weight"
        ):
            await engine.load(tmp_path, 1)
        assert (await engine.generate(PROMPT, params(), KEY)).version_runs == ((0, 0),)


async def test_an_engine_with_unknown_weights_does_not_sample(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        fake.loads_fail = True
        with pytest.raises(EngineError, match="/collective_rpc"):
            await engine.load(weights(tmp_path / "a", b"one"), 1)
        assert engine.receipt.version == 0
        with pytest.raises(EngineError, match="its weights are unknown"):
            await engine.generate(PROMPT, params(), KEY)
        fake.loads_fail = False
        await engine.load(tmp_path / "a", 1)
        assert (await engine.generate(PROMPT, params(), KEY)).version_runs == ((0, 1),)


async def test_a_folder_without_weights_changes_nothing(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        with pytest.raises(EngineError, match="no safetensors file"):
            await engine.load(tmp_path, 1)
        assert (await engine.generate(PROMPT, params(), KEY)).version_runs == ((0, 0),)


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_pause_modes(mode: Any) -> None:
    async with serve_vllm(VOCAB, token_delay_s=0.01) as fake, open_vllm(options(fake)) as engine:
        call = asyncio.create_task(engine.generate(PROMPT, params(60), KEY))
        await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 2)
        await engine.pause(mode)
        if mode == "abort":
            with pytest.raises(EngineError, match="aborted"):
                await call
        else:
            assert not (await asyncio.wait([call], timeout=0.2))[0]
            await engine.resume()
            assert len((await call).ids) == 60


async def test_without_control_routes_it_samples_and_takes_no_weights(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, dev_mode=False) as fake, open_vllm(options(fake)) as engine:
        assert not engine.server.controlled
        assert (await engine.generate(PROMPT, params(), KEY)).version_runs == ((0, 0),)
        for attempt in (engine.pause(), engine.resume(), engine.load(weights(tmp_path / "a", b"a"), 1)):
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                await attempt


async def test_a_server_that_can_never_say_its_version_is_refused() -> None:
    async with serve_vllm(VOCAB, dev_mode=False, scale_out=False) as fake:
        with pytest.raises(EngineError, match="cannot say which weights sampled") as caught:
            async with open_vllm(options(fake)):
                pass
        assert "\n" not in str(caught.value)
