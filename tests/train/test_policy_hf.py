"""A model of transformers behind the policy protocol: the numbers of the embedded Qwen3 on the same weights,
with and without each memory technique, and a refusal of what it cannot compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_lab import sampled_groups, small_model

from whet.engine.embedded_model import Qwen3, save_model
from whet.train.options import TrainConfig
from whet.train.plan import PlanConfig, StepPlan, plan_step
from whet.train.policy import Policy
from whet.train.policy_hf import HfPolicy, open_hf
from whet.train.techniques import Techniques
from whet.train.trainer import Trainer

CPU = torch.device("cpu")


def opened(folder: Path, *, limit: float = 1e-4, dtype: torch.dtype = torch.float32) -> HfPolicy:
    return open_hf(folder, device=CPU, dtype=dtype, limit=limit)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Qwen3, HfPolicy]:
    model = small_model(1)
    save_model(model, tmp_path / "model")
    return model, opened(tmp_path / "model")


def a_plan(token_budget: int = 100) -> StepPlan:
    return plan_step(sampled_groups(small_model(0)), PlanConfig(token_budget=token_budget))


def gradients(model: Policy, plan: StepPlan) -> tuple[float, dict[str, torch.Tensor]]:
    loss = Trainer(model, TrainConfig()).gradients(plan)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, against that tensor's own largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())


@pytest.mark.parametrize("token_budget", [1, 100, 100000])
def test_loss_and_gradients_are_the_embedded_models(pair: tuple[Qwen3, HfPolicy], token_budget: int) -> None:
    plan = a_plan(token_budget)
    ours, theirs = gradients(pair[0], plan), gradients(pair[1], plan)
    assert theirs[0] == pytest.approx(ours[0], rel=1e-5)
    assert relative(theirs[1], ours[1]) < 1e-5


@pytest.mark.parametrize(
    "techniques",
    [
        Techniques(checkpoint=True),
        Techniques(checkpoint=True, save_attention=True),
        Techniques(tile_mlp=7),
        Techniques(checkpoint=True, save_attention=True, tile_mlp=16, offload_activations=True),
    ],
    ids=str,
)
def test_a_technique_changes_no_gradient(pair: tuple[Qwen3, HfPolicy], techniques: Techniques) -> None:
    policy, plan = pair[1], a_plan()
    plain = gradients(policy, plan)
    policy.techniques = techniques
    found = gradients(policy, plan)
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    # tiles add up in another order
    assert relative(found[1], plain[1]) < (2e-6 if techniques.tile_mlp else 1e-30)
