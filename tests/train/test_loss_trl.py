"""Every loss, correction, reducer and baseline that TRL 1.16 has too, against TRL's own code: value and
gradient of the whole batch, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trl_lab import Host, assigned, sampler_ratio

from whet.train.loss.losses import Terms, token_loss
from whet.train.loss.options import LossConfig
from whet.train.plan.advantage import advantages

ROWS, WIDTH = 6, 7
LENGTHS = (7, 3, 5, 1, 6, 4)


def batch() -> dict[str, torch.Tensor]:
    """Padded log-probabilities of the live policy, the trainer before, the sampler and the reference."""
    generator = torch.Generator().manual_seed(5)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    live = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 2 - 0.5
    prox = live + noise(0.3)
    return {
        "live": live,
        "prox": prox,
        "mu": prox + noise(0.5),
        "ref": live + noise(0.4),
        "advantages": torch.tensor([1.2, -0.7, -1.5, 0.4, 0.9, -0.3], dtype=torch.float64),
        "completion_mask": torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None],
    }


def ours(b: dict[str, torch.Tensor], config: LossConfig, reducer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scalar loss and its gradient [rows, width], with the planner's weights of a row."""
    mask = b["completion_mask"]
    n = mask.sum(1, keepdim=True).double()
    weight = {
        "rollout": 1.0 / (ROWS * n),
        "token": torch.full_like(n, 1.0 / float(n.sum())),
        "constant": torch.full_like(n, 1.0 / (ROWS * WIDTH)),
    }[reducer]
    live = b["live"].clone().requires_grad_()

    def whole(a: torch.Tensor, sums: bool = False) -> torch.Tensor:
        total = (a * mask).sum(1, keepdim=True)
        return (total if sums else total / n).expand_as(a)[mask]

    out = token_loss(
        live[mask],
        Terms(
            mu=b["mu"][mask],
            prox=b["prox"][mask],
            ref=b["ref"][mask],
            advantage=b["advantages"][:, None].expand_as(live)[mask],
            live_mu=whole(b["live"] - b["mu"]),
            live_prox=whole(b["live"] - b["prox"]),
            prox_mu=whole(b["prox"] - b["mu"], config.correction_level == "rollout"),
        ),
        config,
    )
    total = (out.loss * weight.expand_as(live)[mask]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert live.grad is not None
    return total.detach(), live.grad


def theirs(b: dict[str, torch.Tensor], **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    live = b["live"].clone().requires_grad_()
    host = Host(live, **settings)
    inputs = {
        "advantages": b["advantages"],
        "completion_mask": b["completion_mask"].long(),
        "old_per_token_logps": b["prox"],
        "sampling_per_token_logps": b["mu"],
        "ref_per_token_logps": b["ref"],
    }
    if host.vllm_importance_sampling_correction:  # type: ignore[attr-defined]
        inputs["importance_sampling_ratio"] = sampler_ratio(
            host, b["prox"], b["mu"], inputs["completion_mask"]
        )
    total = host.loss(inputs)
    total.backward()  # type: ignore[no-untyped-call]
    assert live.grad is not None
    return total.detach(), live.grad


PPO = {"name": "ppo_clip", "ratio": "trainer", "clip_low": 0.2, "clip_high": 0.28}
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}


def corrected(mode: str, high: float, low: float | None = None) -> dict[str, Any]:
    return {
        **VLLM,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": high,
        "vllm_importance_sampling_clip_min": low,
    }


CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo": (PPO, "rollout", {"loss_type": "grpo", **CLIP}),
    "dapo": (PPO, "token", {"loss_type": "dapo", **CLIP}),
    "bnpo": (PPO, "token", {"loss_type": "bnpo", **CLIP}),
    "dr_grpo": (PPO, "constant", {"loss_type": "dr_grpo", **CLIP}),
    "delta": ({**PPO, "dual_clip": 1.4}, "rollout", {"delta": 1.4, **CLIP}),
    "gspo": (
        {"name": "gspo", "ratio": "trainer", "gspo_low": 0.05, "gspo_high": 0.06},
        "rollout",
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
    "cispo": (
        {"name": "cispo", "ratio": "trainer", "cispo_cap": 1.3},
        "token",
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ),
    "k3": ({**PPO, "kl": "k3", "kl_weight": 0.3, "kl_unbiased": False}, "rollout", {"beta": 0.3, **CLIP}),
    "k3_unbiased": (
        {**PPO, "kl": "k3", "kl_weight": 0.3},
        "rollout",
        {"beta": 0.3, "use_bias_correction_kl": True, **CLIP},
    ),
    "opsm": ({**PPO, "opsm": 0.01}, "rollout", {"off_policy_mask_threshold": 0.01, **CLIP}),
    "tis": ({**PPO, "correction": "tis"}, "rollout", {**CLIP, **corrected("token_truncate", 2.0)}),
    "mask": ({**PPO, "correction": "mask"}, "rollout", {**CLIP, **corrected("token_mask", 3.0)}),
    "icepop": (
        {**PPO, "correction": "icepop", "correction_high": 1.5},
        "rollout",
        {**CLIP, **corrected("token_mask", 1.5, 0.5)},
    ),
    "tis_rollout": (
        {**PPO, "correction": "tis", "correction_level": "rollout"},
        "token",
        {"loss_type": "dapo", **CLIP, **corrected("sequence_truncate", 2.0)},
    ),
    "mask_rollout": (
        {**PPO, "correction": "mask", "correction_level": "rollout"},
        "rollout",
        {**CLIP, **corrected("sequence_mask", 3.0)},
    ),
    "tis_and_k3": (
        {**PPO, "correction": "tis", "kl": "k3", "kl_weight": 0.1},
        "rollout",
        {**CLIP, **corrected("token_truncate", 2.0), "beta": 0.1, "use_bias_correction_kl": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trls(name: str) -> None:
    config, reducer, settings = CASES[name]
    b = batch()
    loss, slope = ours(b, LossConfig(**config), reducer)
    expected, rise = theirs(b, **settings)
    assert float(loss) == pytest.approx(float(expected), rel=1e-10)
    assert torch.allclose(slope, rise, rtol=1e-9, atol=1e-12)
    assert int((rise != 0).sum()) > ROWS
    plain = theirs(b, **CLIP)[1]
    assert name in ("grpo",) or not torch.allclose(rise, plain)


def test_advantages_equal_trls() -> None:
    """With a rollout that could not be scored: TRL gives it 0, whet none."""
    rewards = [1.0, 0.0, None, 0.25, 0.5]
    known = np.array([np.nan if r is None else r for r in rewards])
    worker, trainer = "experimental/async_grpo/async_rollout_worker.py", "trainer/rloo_trainer.py"
    scored_mask = ~np.isnan(known)
    names = {"scored": known[scored_mask], "scored_mask": scored_mask, "advantages": np.zeros(5)}
    grpo = assigned(worker, "advantages[scored_mask] =", names)
    names = {"grouped_rewards": torch.from_numpy(known)[None]}
    for text in ("scorable_counts =", "grouped_sum =", "baselines = (grouped_sum"):
        baselines = assigned(trainer, text, names)
    for kind, expected in (("grpo", grpo), ("rloo", np.nan_to_num(known - baselines[0].numpy()))):
        found = [0.0 if a is None else a for a in advantages(rewards, kind)]  # type: ignore[arg-type]
        assert found == pytest.approx(expected.tolist(), rel=1e-9)
        assert len(set(found)) == 5
