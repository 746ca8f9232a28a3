"""Architectures of tests/training/model_zoo.py in a real vLLM on this CPU: what the trainer publishes samples
with the trainer's log-probabilities, at the start and after an update without a restart."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from model_zoo import TWO, ZOO, saved

from insitu.config import WARM_START
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.types import Generation, RequestKey, SamplingParams
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest
from tests.fakes.vllm_server import RealVllm, installed_vllm, start_vllm

pytestmark = pytest.mark.full

PROMPT = np.arange(20, 60, dtype=np.int32)
CLOSE = 1e-3
SHAPE = {
    "vocab_size": 454, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
"""vLLM's kernels want heads of 32; the vocabulary is that of the warm start's tokenizer."""


def gap(policy: HfPolicy, said: Generation) -> float:
    """Largest difference between the server's log-probabilities and the trainer's."""
    assert said.logprobs is not None
    ids = torch.from_numpy(np.concatenate([PROMPT, said.ids]).astype(np.int64))
    with torch.no_grad():
        rows = policy.hidden(ids[:0], ids[None])[0] @ policy.head_weight.T
    ours = rows.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(PROMPT) - 1 :, 0]
    return float(np.abs(ours.numpy() - said.logprobs).max())


async def check(server: RealVllm, policies: Sequence[HfPolicy], second: Path) -> None:
    async with open_vllm(HttpOptions(url=server.url, call_deadline_s=200.0)) as engine:
        assert await worst(engine, policies[0]) < CLOSE
        assert await worst(engine, policies[1]) > 100 * CLOSE
        await engine.load(second, 2)
        assert await worst(engine, policies[1]) < CLOSE


async def worst(engine: VllmEngine, policy: HfPolicy) -> float:
    """Over two answers, longer than any window of the zoo."""
    params = SamplingParams(max_tokens=32)
    said = [await engine.generate(PROMPT, params, RequestKey(seed=1, rollout_id="r", turn=n)) for n in (0, 1)]
    return max(gap(policy, one) for one in said)


@pytest.mark.parametrize("name", [name for name, tried in ZOO.items() if tried.vllm == "yes"])
def test_published_weights_sample_as_they_train(name: str, tmp_path: Path) -> None:
    tried = ZOO[name]
    start = saved(tmp_path, tried.kind, **TWO, **{**tried.changed, **SHAPE})
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(WARM_START / file, start / file)
    policies, folders = [], [tmp_path / "v1", tmp_path / "v2"]
    for version, folder in enumerate(folders, 1):
        policy = open_hf(start, device=torch.device("cpu"), dtype=torch.float32)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        wanted = ExportRequest(folder=folder, version=version, dtype="float32", own_head=True)
        export(policy, wanted, start)
        policies.append(policy)
    venv = installed_vllm(Path(__file__).parents[2] / "scripts" / "setup-vllm")
    with start_vllm(venv, folders[0], tmp_path / "server.log") as server:
        asyncio.run(check(server, policies, folders[1]))
