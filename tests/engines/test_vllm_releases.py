"""vLLM 0.26 has no routes that tell of its weights: insitu's worker extension does, or it is refused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from insitu.engines.http import HttpOptions
from insitu.engines.safetensors_file import read_folder, sums_of, write_manifest
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.engines.vllm_weights import FRESH
from insitu.engines.vllm_worker import InsituWorker
from insitu.errors import EngineError
from insitu.types import Generation, RequestKey, SamplingParams
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import chance_folder, chance_tensors

pytestmark = pytest.mark.slow

VOCAB = 40
PROMPT = np.arange(5, 12, dtype=np.int32)

OLD: dict[str, Any] = {"release": "0.26.0", "extension": True}


def options(fake: FakeVllm) -> HttpOptions:
    return HttpOptions(url=fake.url, call_deadline_s=10.0, control_deadline_s=2.0)


async def ask(engine: VllmEngine, max_tokens: int = 8) -> Generation:
    key = RequestKey(seed=1, rollout_id="r", turn=0)
    return await engine.generate(PROMPT, SamplingParams(max_tokens=max_tokens), key)


def published(folder: Path, seed: str, version: int) -> Path:
    chance_folder(folder, seed)
    write_manifest(folder, version, sums_of(read_folder(folder)))
    return folder


async def test_new_weights_reach_it_with_their_proof(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, **OLD) as fake, open_vllm(options(fake)) as engine:
        assert engine.server.route == "completions"  # its other route names no ids beside logprobs
        assert (await ask(engine)).version_runs == ((0, 0),)
        before = engine.receipt.checksum
        receipt = await engine.load(published(tmp_path / "v1", "one", 1), 1, mode="keep")
        assert receipt.tensors == sums_of(chance_tensors("one"))
        assert receipt.checksum != before
        assert (await ask(engine)).version_runs == ((0, 1),)
        fake.skips = "model.norm.weight"
        with pytest.raises(EngineError, match="model.norm.weight"):
            await engine.load(published(tmp_path / "v2", "two", 2), 2)


async def test_a_call_under_way_ends_before_the_weights_change(tmp_path: Path) -> None:
    """Its reply does not say which weights sampled what, so it must have been one version."""
    async with serve_vllm(VOCAB, token_delay_s=0.01, **OLD) as fake, open_vllm(options(fake)) as engine:
        call = asyncio.create_task(ask(engine, 30))
        async with asyncio.timeout(5):
            while not (fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 2):  # noqa: ASYNC110 - a test
                await asyncio.sleep(0.005)
        loading = asyncio.create_task(engine.load(published(tmp_path / "v1", "one", 1), 1, mode="keep"))
        said = await call
        assert not loading.done()
        assert len(said.ids) == 30
        assert said.version_runs == ((0, 0),)
        assert (await loading).version == 1


async def test_a_server_that_was_started_again_is_noticed(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, **OLD) as fake, open_vllm(options(fake)) as engine:
        await engine.load(published(tmp_path / "v1", "one", 1), 1)
        fake.restart()
        with pytest.raises(EngineError):
            await ask(engine)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"release": "0.26.0"},
            "vllm 0.26.0 cannot say which weights it holds: it needs /weight_info and /weight_checker",
        ),
        (
            {"release": "0.26.0", "dev_mode": False, "scale_out": False},
            "vllm 0.26.0 at .* it needs /weight_info and /weight_checker, as vLLM 0.32",
        ),
    ],
)
async def test_one_that_cannot_be_asked_is_refused_with_what_is_supported(given: Any, words: str) -> None:
    async with serve_vllm(VOCAB, **given) as fake:
        with pytest.raises(EngineError, match=words) as refused:
            async with open_vllm(options(fake)):
                pass
        assert "--worker-extension-cls insitu.engines.vllm_worker.InsituWorker" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("0.32.1", None),
        (
            "0.33.0",
            "vllm 0.33.0 at {}: tests ran with 0.32 and 0.26; weights by /weight_info,"
            " samples by generate, numbers by the probe",
        ),
        (
            "0.31.0.dev3",
            "vllm 0.31.0.dev3 at {}: tests ran with 0.32 and 0.26; weights by /weight_info,"
            " samples by completions, numbers by the probe",
        ),
    ],
)
async def test_another_release_is_taken_by_its_routes_and_a_line_says_so(
    release: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serve_vllm(VOCAB, release=release, scale_out=".dev" not in release) as fake,
        open_vllm(options(fake)) as engine,
    ):
        assert len((await ask(engine)).ids)
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert lines == ([] if said is None else [said.format(fake.url)])


async def test_logprobs_without_ids_are_not_called_those_of_other_ids() -> None:
    async with (
        serve_vllm(VOCAB, release="0.26.0", dev_mode=False) as fake,
        open_vllm(options(fake)) as engine,
    ):
        with pytest.raises(
            EngineError, match=r"its logprobs name no ids, as before 0\.32: start it with VLLM_S"
        ):
            await ask(engine)


def test_a_worker_tells_the_bytes_of_its_parameters() -> None:
    class Worker(InsituWorker):
        rank = 3

        def __init__(self) -> None:
            self.model = nn.Linear(4, 3).bfloat16()
            self.empty = nn.Parameter(torch.empty(0))
            self.model.register_parameter("packed", self.empty)

        @property
        def model_runner(self) -> Worker:
            return self

        def get_model(self) -> nn.Module:
            return self.model

    worker = Worker()
    assert worker.insitu_weights() == {"label": FRESH, "rank": 3}
    worker.insitu_set_label("7")
    said = worker.insitu_weights(with_sums="yes")
    weight = worker.model.weight.detach().view(torch.uint8).numpy().tobytes()
    assert said["label"] == "7"
    assert said["sums"]["weight"] == hashlib.sha256(weight).hexdigest()
    assert said["sums"]["packed"] == hashlib.sha256(b"").hexdigest()
