"""Every loss, correction, reducer and baseline that TRL 1.16 has too, against TRL's own code: value and
gradient of the whole batch, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from train_lab import group, rollout, segment
from trl.rewards import get_soft_overlong_punishment
from trl_lab import Host, assigned, sampler_ratio

from insitu.config.training import LossConfig
from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.plan.advantage import advantages, overlong_penalty
from insitu_train.plan.step import PlanConfig, plan_step

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

Batch = dict[str, torch.Tensor]

ROWS, WIDTH = 6, 7
LENGTHS = (7, 3, 5, 1, 6, 4)


def batch() -> Batch:
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


def planned(b: Batch, reducer: str, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The planner's weight and advantage of every row, both [rows], where the rewards are the batch's
    advantages. The first rollout is two rows of a plan: it is one to every mean."""
    per_group = ROWS // groups
    made = []
    for g in range(groups):
        members = []
        for k in range(per_group):
            row = g * per_group + k
            name = f"train/0/{g}/{k}"
            ids, mask = list(range(LENGTHS[row] + 1)), [False] + [True] * LENGTHS[row]
            cut = 3 if row == 0 else 0
            parts = (
                [mask]
                if not cut
                else [[*mask[:cut], *[False] * (len(mask) - cut)], [False] * cut + mask[cut:]]
            )
            segments = [segment(name, i, ids, part, [-1.0] * len(ids)) for i, part in enumerate(parts)]
            members.append(rollout(name, float(b["advantages"][row]), segments))
        made.append(group(f"train/0/{g}", members))
    plan = plan_step(made, PlanConfig(reducer=reducer, constant_tokens=WIDTH))  # type: ignore[arg-type]
    assert len(plan.rows) == ROWS + 1
    assert plan.rows[0].weight == plan.rows[1].weight
    found = torch.tensor([(r.weight, r.advantage) for r in plan.rows[1:]], dtype=torch.float64)
    return found[:, :1], found[:, 1:]


def ours(b: Batch, config: LossConfig, reducer: str, groups: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Scalar loss and its gradient [rows, width], with weight and advantage of a row from the planner."""
    mask = b["completion_mask"]
    n = mask.sum(1, keepdim=True).double()
    weight, advantage = planned(b, reducer, groups)
    live = b["live"].clone().requires_grad_()

    def whole(a: torch.Tensor, sums: bool = False) -> torch.Tensor:
        total = (a * mask).sum(1, keepdim=True)
        return (total if sums else total / n).expand_as(a)[mask]

    out = token_loss(
        live[mask],
        LossInputs(
            mu=b["mu"][mask],
            prox=b["prox"][mask],
            ref=b["ref"][mask],
            advantage=advantage.expand_as(live)[mask],
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


def theirs(b: Batch, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
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


PPO = {"loss": "ppo_clip", "ratio": "trainer", "clip": (0.2, 0.28)}
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
        {"loss": "gspo", "ratio": "trainer", "clip": (0.05, 0.06)},
        "rollout",
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
    "cispo": (
        {"loss": "cispo", "ratio": "trainer", "clip": (0.0, 0.3)},
        "token",
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ),
    "k3": ({**PPO, "kl": "k3", "kl_weight": 0.3, "kl_unbiased": False}, "rollout", {"beta": 0.3, **CLIP}),
    "k3_unbiased": (
        {**PPO, "kl": "k3", "kl_weight": 0.3},
        "rollout",
        {"beta": 0.3, "use_bias_correction_kl": True, **CLIP},
    ),
    "off_policy_mask": (
        {**PPO, "off_policy_mask": 0.01},
        "rollout",
        {"off_policy_mask_threshold": 0.01, **CLIP},
    ),
    "tis": ({**PPO, "correction": "tis"}, "rollout", {**CLIP, **corrected("token_truncate", 2.0)}),
    "mask": ({**PPO, "correction": "mask"}, "rollout", {**CLIP, **corrected("token_mask", 3.0)}),
    "icepop": (
        {**PPO, "correction": "icepop", "correction_bounds": (0.5, 1.5)},
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


def test_a_mean_over_groups_is_one_of_trls_token_means() -> None:
    """TRL has no such reducer: it is that of DAPO, group by group."""
    b = batch()
    loss, slope = ours(b, LossConfig(**PPO), "group", groups=2)
    b["advantages"] = planned(b, "group", 2)[1][:, 0]
    halves = [{name: values[part] for name, values in b.items()} for part in (slice(0, 3), slice(3, 6))]
    found = [theirs(half, loss_type="dapo", **CLIP) for half in halves]
    assert float(loss) == pytest.approx(float(sum(f[0] for f in found)) / 2, rel=1e-10)
    assert torch.allclose(slope, torch.cat([f[1] for f in found]) / 2, rtol=1e-9, atol=1e-12)
    whole = theirs(b, loss_type="dapo", **CLIP)[1]
    assert not torch.allclose(slope, whole)


def test_overlong_shaping_equals_trls() -> None:
    punish = get_soft_overlong_punishment(100, 20)
    for tokens in (0, 79, 80, 81, 90, 99, 100, 101, 500):
        assert -overlong_penalty(tokens, (80, 100)) == pytest.approx(punish([[1] * tokens])[0], abs=1e-12)
    # and through the planner: two rollouts of one reward, parted by their lengths alone
    config = PlanConfig(overlong_tokens=(80, 100))
    members = []
    for name, tokens in (("g/0/0", 85), ("g/0/1", 95)):
        mask = [False] + [True] * tokens
        part = segment(name, 0, list(range(tokens + 1)), mask, [-1.0] * (tokens + 1))
        members.append(rollout(name, 1.0, [part]))
    given = [punish([[1] * tokens])[0] for tokens in (85, 95)]
    mean = sum(given) / 2
    rows = plan_step([group("g/0", members)], config).rows
    assert [r.advantage for r in rows] == pytest.approx([x - mean for x in given])
    assert rows[0].advantage == pytest.approx(0.25)


def test_advantages_equal_trls() -> None:
    """With a rollout that could not be scored: TRL gives it 0, insitu none."""
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
