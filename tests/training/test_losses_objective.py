"""Whole steps of every loss against autograd on whole sequences in float64, one rollout at a time, without
a planner: segments of a rollout lie in several micro-batches, the policy has moved since it was sampled, and
again since the step began; one rollout of each group has advantage zero."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import apart, rounding
from train_lab import group, rollout, sampled_groups, segment, slow_logprobs, small_model

from insitu.config.training import LossConfig
from insitu.errors import ConfigError, TrainError
from insitu.types import Group, Rollout
from insitu_train.embedded.model import Qwen3, save_model
from insitu_train.loss.inputs import StepInputs
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer import checkpoint
from insitu_train.trainer.reference import Reference, read_reference
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

Named = dict[str, torch.Tensor]
TRAINER = {"ratio": "trainer"}
CONFIGS: dict[str, dict[str, object]] = {
    "dppo_opsm": {"off_policy_mask": 0.05},
    "ppo_clip_tis": {"loss": "ppo_clip", **TRAINER, "correction": "tis", "correction_bounds": (0.0, 1.1)},
    "ppo_clip_rollout": {"loss": "ppo_clip", **TRAINER, "correction": "mask", "correction_level": "rollout"},
    "cispo_icepop": {"loss": "cispo", **TRAINER, "correction": "icepop", "correction_level": "rollout_mean",
                     "correction_bounds": (0.95, 1.1)},
    "gspo": {"loss": "gspo", "clip": (0.05, 0.05)},
    "gspo_trainer": {"loss": "gspo", **TRAINER, "clip": (0.05, 0.05), "off_policy_mask": 0.1},
    "decoupled": {"loss": "decoupled"},
    "k1": {"loss": "ppo_clip", "kl": "k1", "kl_weight": 0.2},
    "k2": {"loss": "gspo", **TRAINER, "kl": "k2", "kl_weight": 0.2},
    "k3": {"kl": "k3", "kl_weight": 0.2},
}  # fmt: skip


def moved(model: Qwen3, size: float) -> Qwen3:
    """A copy, some way off."""
    other = small_model()
    generator = torch.Generator().manual_seed(int(1e6 * size))
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q + size * torch.randn(q.shape, generator=generator))
    return other


def in_segments(groups: list[Group]) -> list[Group]:
    """The same groups with every rollout cut in two rows."""
    made = []
    for g in groups:
        members = []
        for r in g.rollouts:
            (s,) = r.trajectory.segments
            halves = [s.mask & (np.arange(len(s.mask)) < 20), s.mask & (np.arange(len(s.mask)) >= 20)]
            parts = [segment(r.id, i, s.ids, m, s.logprobs) for i, m in enumerate(halves)]
            members.append(rollout(r.id, r.reward, parts))
        made.append(group(g.id, members))
    return made


def tokens(model: Qwen3, r: Rollout) -> torch.Tensor:
    """[n] log-probabilities of a rollout's trained tokens, over all its segments, in the model's type."""
    found = [slow_logprobs(model, s.ids)[torch.from_numpy(s.mask)] for s in r.trajectory.segments]
    return torch.cat(found)


def factor(prox: torch.Tensor, mu: torch.Tensor, c: LossConfig) -> torch.Tensor:
    """What a correction multiplies by."""
    d = prox - mu
    if c.loss == "decoupled" and c.correction == "none":
        return d.exp()
    d = {"token": d, "rollout": d.sum().expand_as(d), "rollout_mean": d.mean().expand_as(d)}[
        c.correction_level
    ]
    w = d.exp()
    low, high = c.correction_bounds or {"mask": (0.0, 3.0), "icepop": (0.5, 5.0)}[c.correction]
    if c.correction == "tis":
        return w.clamp(max=high)
    return w * (w <= high).double() * (w >= low).double()


def policy_term(
    live: torch.Tensor, mu: torch.Tensor, prox: torch.Tensor, a: float, c: LossConfig
) -> torch.Tensor:
    """[n] token losses of one rollout; gspo's is the rollout's own, given to each token."""
    old = prox if c.ratio == "trainer" or c.loss == "decoupled" else mu
    r = (live - old).exp()
    if c.loss == "gspo":
        s = (live - old).mean().exp()
        return -torch.min(s * a, s.clamp(1 - c.clips[0], 1 + c.clips[1]) * a).expand_as(live)
    if c.loss == "cispo":
        return -r.detach().clamp(max=5.0) * a * live
    if c.loss == "dppo":
        step = live.detach().exp() - mu.exp()
        kept = ~((step > 0.2) if a > 0 else (step < -0.2))
        return -(live - mu).exp() * a * kept
    return -torch.min(r * a, r.clamp(0.8, 1.28) * a)


def slow_gradients(
    model: Qwen3, before: Qwen3, reference: Qwen3, groups: list[Group], c: LossConfig
) -> tuple[float, Named]:
    """Mean over rollouts of means over their tokens, from the definitions; models in float64."""
    total = torch.zeros((), dtype=torch.float64)
    n = sum(len(g.rollouts) for g in groups)
    for g in groups:
        mean = sum(g.rewards) / len(g.rewards)
        for r in g.rollouts:
            assert r.reward is not None
            a = r.reward - mean
            live = tokens(model, r)
            with torch.no_grad():
                prox, ref = tokens(before, r), tokens(reference, r)
            mu = torch.cat([torch.from_numpy(s.logprobs[s.mask]) for s in r.trajectory.segments]).double()
            loss = policy_term(live, mu, prox, a, c)
            if c.correction != "none" or c.loss == "decoupled":
                loss = loss * factor(prox, mu, c)
            if c.off_policy_mask and a < 0 and float((mu - live.detach()).mean()) > c.off_policy_mask:
                loss = loss * 0.0
            if c.loss == "dppo":
                loss = loss + 1e-3 * (live - mu) ** 2
            if c.kl != "none":
                d = live - ref
                ratio = (live - (prox if c.ratio == "trainer" else mu)).exp()
                pull = {"k1": ratio * d, "k2": ratio.detach() * d**2 / 2, "k3": ratio * ((-d).exp() - 1 + d)}
                loss = loss + c.kl_weight * pull[c.kl]
            total = total + loss.mean() / n
    model.zero_grad()
    total.backward()
    return float(total.detach()), grads(model)


def grads(model: Qwen3) -> Named:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradients(trainer: Trainer, plan: StepPlan, terms: StepInputs, epoch: int) -> tuple[float, Named]:
    trainer.optimiser.zero()
    with trainer._deterministic():
        loss = trainer._summed(plan, terms, epoch, measure=False).loss
    return loss, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def take(model: Qwen3, weights: Qwen3) -> None:
    with torch.no_grad():
        for p, q in zip(model.parameters(), weights.parameters(), strict=True):
            p.copy_(q)


# Every second one in make test-full: they take a second each.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if i % 2 else ()) for i, name in enumerate(CONFIGS)]
)
def test_loss_and_gradient_before_and_after_an_update(name: str) -> None:
    c = LossConfig(**CONFIGS[name])  # type: ignore[arg-type]
    sampler = small_model()
    groups = in_segments(sampled_groups(sampler, groups=3, size=3))
    assert all(0.5 in g.rewards and sum(g.rewards) == 1.5 for g in groups)
    begun, later, reference = (moved(sampler, size) for size in (0.01, 0.015, 0.02))
    model = small_model()
    take(model, begun)
    trainer = Trainer(model, TrainConfig(loss=c, epochs=2), reference=Reference(moved(reference, 0.0)))
    plan = plan_step(groups, PlanConfig(token_budget=50, pull=c.has_kl_term))
    assert len({r.rollout_id for r in plan.rows}) == (9 if c.has_kl_term else 6)
    batch_of = {i: k for k, batch in enumerate(plan.batches) for i in batch.rows}
    assert any(batch_of[i] != batch_of[i + 1] for i in range(0, len(plan.rows), 2))  # segments of one rollout
    terms = StepInputs(plan, c)
    for epoch, now in enumerate((begun, later)):
        take(model, now)
        loss, found = gradients(trainer, plan, terms, epoch)
        models, slow = (now, begun, reference), partial(slow_gradients, groups=groups, c=c)
        expected_loss, expected = slow(*(moved(m, 0.0).double() for m in models))
        loss_may, may = rounding(slow, *models)
        assert max(loss_may, *may.values()) < 1e-3  # a tolerance that hides nothing
        assert abs(loss - expected_loss) <= loss_may
        assert found.keys() == expected.keys()
        far = {n: apart(found[n], g) for n, g in expected.items()}
        assert all(far[n] <= may[n] for n in far), (far, may)


def test_a_step_tells_how_far_the_policy_is_from_those_that_sampled() -> None:
    sampler = small_model()
    groups = sampled_groups(sampler, version=3)
    model, reference = moved(sampler, 0.02), moved(sampler, 0.03)
    found, credit = [], []
    for g in groups:
        for r in g.rollouts:
            (row,) = r.trajectory.segments
            a = (r.reward or 0.0) - sum(g.rewards) / len(g.rewards)
            if a:
                credit += [a] * int(row.mask.sum())
                with torch.no_grad():
                    found.append(
                        (tokens(model, r), tokens(reference, r), torch.from_numpy(row.logprobs[row.mask]))
                    )
    live, ref, mu = (torch.cat(parts).double() for parts in zip(*found, strict=True))
    d, log_rho = live - ref, (live - mu).numpy()
    config = TrainConfig(
        loss=LossConfig(loss="ppo_clip", clip=(0.01, 0.02), kl="k3"),
        max_staleness=1,
        alarms={"kl": 1e-6, "reference_kl": 1e-6},
    )
    trainer = Trainer(model, config, version=4, reference=Reference(reference))
    plan = plan_step(groups, PlanConfig())
    assert plan.tokens == len(log_rho) == len(d)
    result = trainer.step(plan)
    rho = np.exp(log_rho)
    assert result.off_policy_kl == pytest.approx(float(np.mean(rho - 1 - log_rho)), rel=1e-3)
    assert result.ess == pytest.approx(float(rho.sum() ** 2 / (len(rho) * (rho**2).sum())), rel=1e-5)
    assert 0.5 < result.ess < 1.0
    assert result.ref_kl == pytest.approx(float(((-d).exp() - 1 + d).mean()), rel=1e-3)
    assert result.mismatch_kl == 0.0  # every token is of an older version
    low = (np.array(credit) < 0) & (rho < 0.99)
    high = (np.array(credit) > 0) & (rho > 1.02)
    assert result.clip_low_fraction == pytest.approx(low.mean())
    assert result.clip_high_fraction == pytest.approx(high.mean())
    assert 0 < low.sum() != high.sum() > 0
    assert result.clip_fraction == pytest.approx(result.clip_low_fraction + result.clip_high_fraction)
    assert result.alarm.startswith(f"KL to the sampling policies is {result.off_policy_kl:.3g} nats")
    assert f"; KL to the reference policy is {result.ref_kl:.3g} nats" in result.alarm


def test_agreement_raises_no_alarm_and_the_reference_stays_as_it_is() -> None:
    model = small_model()
    reference = Reference(small_model())
    held = reference.checksum
    config = TrainConfig(
        loss=LossConfig(kl="k3", kl_weight=0.1), alarms={"kl": 1e-3, "reference_kl": 0.1}, epochs=2
    )
    trainer = Trainer(model, config, reference=reference)
    for step in range(2):
        result = trainer.step(plan_step(sampled_groups(model, version=step), PlanConfig()))
        assert (result.alarm, result.corrected_fraction) == ("", 0.0)
        assert result.ess == pytest.approx(1.0, abs=1e-5)
        assert (result.ref_kl > 1e-12) == (step > 0)
    assert Reference(reference._model).checksum == held


def test_a_missing_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="kl=k2 needs a reference policy"):
        Trainer(small_model(), TrainConfig(loss=LossConfig(kl="k2")))


def test_a_checkpoint_knows_its_reference(tmp_path: Path) -> None:
    config = TrainConfig(loss=LossConfig(kl="k2", kl_weight=0.1))
    trainer = Trainer(small_model(), config, reference=Reference(small_model(1)))
    checkpoint.save(trainer, tmp_path / "c")
    checkpoint.load(Trainer(small_model(), config, reference=Reference(small_model(1))), tmp_path / "c")
    for other in (
        Trainer(small_model(), config, reference=Reference(small_model(2))),
        Trainer(small_model(), TrainConfig()),
    ):
        with pytest.raises(TrainError, match="was made with a different reference policy"):
            checkpoint.load(other, tmp_path / "c")


def test_the_reference_comes_from_its_own_folder_or_the_one_training_begins_with(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_model(small_model(seed), tmp_path / str(seed))
    loss = LossConfig(kl="k3")
    assert read_reference(TrainConfig(), tmp_path / "1") is None
    own = read_reference(TrainConfig(loss=loss, reference=str(tmp_path / "2")), tmp_path / "1")
    begun = read_reference(TrainConfig(loss=loss), tmp_path / "1")
    assert own is not None
    assert begun is not None
    assert own.checksum == Reference(small_model(2)).checksum
    assert begun.checksum == Reference(small_model(1)).checksum
    with pytest.raises(
        ConfigError, match=r"^train.reference: .*none is not a model folder: it has no config"
    ):
        read_reference(TrainConfig(loss=loss, reference=str(tmp_path / "none")), tmp_path / "1")
