"""Adapters that an engine gets merged into rounded matrices: the trainer computes with what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rounding import apart
from train_lab import sampled_groups, small_model

from insitu.config import load_config
from insitu_train.embedded.model import save_model
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.model.load import open_policy
from insitu_train.model.lora import merged_weight
from insitu_train.options import Lora, OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.numeric, pytest.mark.slow]
CPU = torch.device("cpu")
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
SMALL = TrainConfig(optim=OptimConfig(lr=2e-5), max_logprob_gap=1.0, max_staleness=9)
"""The rate of examples/qwen3-vllm.toml: one step moves hardly any number of a bfloat16 matrix."""

MERGED = {"engine.kind": "vllm", "engine.publish_lora": "merged"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights are bfloat16 numbers."""
    model = small_model(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def a_plan() -> StepPlan:
    return plan_step(sampled_groups(small_model(1)), PlanConfig())


def opened(folder: Path, lora: Lora | None, dtype: torch.dtype = torch.bfloat16) -> HfPolicy:
    return open_hf(folder, device=CPU, dtype=dtype, lora=lora)


def logprobs(policy: HfPolicy) -> torch.Tensor:
    return torch.cat(Trainer(policy, SMALL).logprobs(a_plan()))


@pytest.mark.parametrize("steps", [1, 5])
def test_the_trained_policy_is_the_merged_one(folder: Path, tmp_path: Path, steps: int) -> None:
    policy = opened(folder, LORA.changed(merged="bfloat16"))
    trainer = Trainer(policy, SMALL)
    for _ in range(steps):
        trainer.step(a_plan())
    policy.stored(whole=True).write(tmp_path / "served")
    served = logprobs(opened(tmp_path / "served", None))
    assert torch.equal(logprobs(policy), served)
    # adapters beside their matrix are another policy than the one that was served
    beside = opened(folder, LORA)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            dict(beside.named_parameters())[name].copy_(p)
    assert not torch.equal(logprobs(beside), served)


def test_updates_below_the_last_place_add_up_until_they_arrive() -> None:
    """What of an adapter is in the rounded sum: little at first, all of it later, none of it lost."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(256, 256, generator=generator)).bfloat16()
    down = torch.empty(16, 256).uniform_(-(256**-0.5), 256**-0.5, generator=generator)
    direction = torch.sign(torch.randn(256, 16, generator=generator))
    lora, shares = Lora(rank=16, alpha=32.0, targets=(), merged="bfloat16"), []
    for steps in (1, 5, 50):
        up = 2e-5 * steps * direction
        wanted = 2.0 * up @ down
        found = (merged_weight(lora, weight, down, up).float() - weight.float()).flatten()
        shares.append(float(found @ wanted.flatten() / wanted.square().sum()))
    assert shares[0] < 0.25 < shares[1] < 0.9 < shares[2] < 1.1, shares


def test_gradients_are_those_of_adapters(folder: Path) -> None:
    found = []
    for lora in (LORA, LORA.changed(merged="float32")):
        policy = opened(folder, lora, torch.float32)
        with torch.no_grad():
            for name, p in policy.named_parameters():
                if name.endswith("lora_B"):
                    p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
        Trainer(policy, SMALL).gradients(a_plan())
        found.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    plain, merged = found
    assert plain.keys() == merged.keys()
    assert all(apart(merged[n], g) < 1e-4 for n, g in plain.items())


@pytest.mark.parametrize(
    ("lines", "merged"),
    [
        ({"engine.kind": "vllm"}, ""),
        (MERGED, "auto"),
        ({**MERGED, "engine.publish_dtype": "bfloat16"}, "bfloat16"),
        ({"engine.kind": "sglang"}, "auto"),
    ],
)  # fmt: skip
def test_the_configuration_says_what_the_engine_gets(
    folder: Path, lines: dict[str, str], merged: str
) -> None:
    given = {"engine.urls": "http://127.0.0.1:1", "policy.kind": "hf", "policy.lora_rank": "2", **lines}
    config = load_config(None, [f"{key}={value}" for key, value in given.items()])
    policy = PolicyConfig.of(config)
    assert policy.lora is not None
    assert policy.lora.merged == merged
    if merged == "auto":
        held = open_policy(folder, policy, CPU)
        assert isinstance(held, HfPolicy)
        assert held.lora is not None
        assert held.lora.merged == "float32"  # as the folder's config.json says
