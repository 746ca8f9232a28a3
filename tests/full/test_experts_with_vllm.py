"""A mixture of experts in a real vLLM on this CPU: what the trainer publishes samples with the trainer's
log-probabilities. This build does not pack experts again after a reload, so it is refused one."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from insitu.config import WARM_START
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.errors import EngineError
from insitu.types import Generation, RequestKey, SamplingParams
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest
from tests.fakes.vllm_server import RealVllm, installed_vllm, start_vllm

pytestmark = pytest.mark.full

PROMPT = np.arange(20, 60, dtype=np.int32)
CLOSE = 1e-3
SHAPE = {
    "vocab_size": 454, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def random_model(folder: Path) -> Path:
    """A Qwen3-MoE whose distributions are far from uniform, with the warm start's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**SHAPE))
    move(model, 3.0, 0.0)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(WARM_START / name, folder / name)
    return folder


def move(model: torch.nn.Module, scale: float, noise: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale * (1 + noise * torch.randn_like(parameter)))


def gap(policy: HfPolicy, said: Generation) -> float:
    """Largest difference between the server's log-probabilities and the trainer's."""
    assert said.logprobs is not None
    ids = torch.from_numpy(np.concatenate([PROMPT, said.ids]).astype(np.int64))
    with torch.no_grad():
        rows = policy.hidden(ids[:0], ids[None])[0] @ policy.head_weight.T
    ours = rows.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(PROMPT) - 1 :, 0]
    return float(np.abs(ours.numpy() - said.logprobs).max())


async def ask(engine: VllmEngine, turn: int) -> Generation:
    return await engine.generate(
        PROMPT, SamplingParams(max_tokens=48), RequestKey(seed=1, rollout_id="r", turn=turn)
    )


async def check(server: RealVllm, policies: Sequence[HfPolicy], folders: Sequence[Path]) -> None:
    start, first, second = policies

    async def worst(policy: HfPolicy) -> float:
        return max([gap(policy, await ask(engine, turn)) for turn in range(4)])

    async with open_vllm(HttpOptions(url=server.url, call_deadline_s=120.0)) as engine:
        assert await worst(first) < CLOSE
        assert await worst(start) > 100 * CLOSE
        # Names are matched before: a parameter of the server that nothing feeds would be the reason.
        with pytest.raises(EngineError, match="not its experts after a reload"):
            await engine.load(folders[1], 2)
        assert await worst(first) < CLOSE
        await asyncio.to_thread(rpc, server, "reload_weights", weights_path=str(folders[1]))
        await engine.flush()
        assert await worst(second) > 100 * CLOSE, "packed after a reload: the refusal can go"
        await asyncio.to_thread(rpc, server, "repack_experts")
        await engine.flush()
        assert await worst(second) < CLOSE


def rpc(server: RealVllm, method: str, **given: object) -> None:
    body = json.dumps({"method": method, "kwargs": given}).encode()
    asked = urllib.request.Request(f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert answer.status == 200


def test_published_experts_sample_as_they_train(tmp_path: Path) -> None:
    start = random_model(tmp_path / "start")
    cpu = torch.device("cpu")
    policies = [open_hf(start, device=cpu, dtype=torch.float32, lora=None) for _ in range(3)]
    folders = [tmp_path / "v1", tmp_path / "v2"]
    for version, folder in enumerate(folders, 1):
        move(policies[version].model, 1.0, 0.05)
        export(policies[version], ExportRequest(folder=folder, version=version, dtype="float32"), start)
    venv = installed_vllm(Path(__file__).parents[2] / "scripts" / "setup-vllm")
    repack = "tests.fakes.vllm_repack.RepackExperts"
    with start_vllm(venv, folders[0], tmp_path / "server.log", extension=repack) as server:
        asyncio.run(check(server, policies, folders))
