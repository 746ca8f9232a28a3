"""The trainer: right gradients whatever the packing, exact agreement with the sampler, refusals that change
nothing, and the same bits for the same plan."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from train_lab import CONFIG, group, rollout, sampled_groups, segment, slow_logprobs, small_model
from transformers import Qwen3ForCausalLM

from insitu.config.training import LossConfig, LossName
from insitu.errors import BadStepError, TrainError
from insitu.types import Group
from insitu_train.embedded.model import Qwen3, save_model
from insitu_train.options import OptimConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

Named = dict[str, torch.Tensor]


def gradients(model: Qwen3, plan: StepPlan, config: TrainConfig | None = None) -> tuple[float, Named]:
    loss = Trainer(model, config or TrainConfig()).gradients(plan)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: Qwen3) -> Named:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def same(a: Named, b: Named) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def gap(a: Named, b: Named) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def slow_gradients(model: Qwen3, groups: list[Group]) -> tuple[float, Named]:
    """rollout_mean of ppo_clip from the definition, one whole sequence at a time, no planner."""
    total = torch.zeros(())
    useful = [g for g in groups if not g.degenerate]
    n = sum(len(g.rollouts) for g in useful)
    for g in useful:
        mean = sum(g.rewards) / len(g.rewards)
        for r in g.rollouts:
            a = r.reward - mean
            count = sum(int(s.mask.sum()) for s in r.trajectory.segments)
            for s in r.trajectory.segments:
                logp = slow_logprobs(model, s.ids)[torch.from_numpy(s.mask)]
                rho = (logp - torch.from_numpy(s.logprobs[s.mask])).exp()
                total = total - torch.min(rho * a, rho.clamp(0.8, 1.28) * a).sum() / (n * count)
    model.zero_grad()
    total.backward()
    return float(total.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}


def test_loss_and_gradient_equal_a_slow_reference_with_old_not_new() -> None:
    groups = sampled_groups(small_model(0))
    model = small_model(1)  # not the sampler's weights
    expected = slow_gradients(model, groups)
    config = TrainConfig(loss=LossConfig(loss="ppo_clip"))
    found = gradients(model, plan_step(groups, PlanConfig()), config)
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert max(float(g.abs().max()) for g in expected[1].values()) > 1e-3
    assert gap(found[1], expected[1]) < 1e-6


@pytest.mark.parametrize("reducer", ["rollout", "token", "constant", "group"])
def test_packing_and_order_leave_loss_and_gradient_alone(reducer: str) -> None:
    groups = sampled_groups(small_model(0))
    model = small_model(1)
    plans = [
        plan_step(groups, PlanConfig(reducer=reducer, token_budget=n))  # type: ignore[arg-type]
        for n in (1, 60, 100, 100000)
    ]
    assert len({len(p.batches) for p in plans}) >= 3
    turned = dataclasses.replace(plans[-1], batches=tuple(
        dataclasses.replace(b, rows=b.rows[::-1]) for b in plans[-1].batches[::-1]
    ))  # fmt: skip
    loss, grad = gradients(model, plans[0])
    for plan in [*plans[1:], turned]:
        other_loss, other_grad = gradients(model, plan)
        assert abs(loss - other_loss) < 1e-6
        assert gap(grad, other_grad) < 1e-6


def test_splitting_a_rollout_in_segments_leaves_loss_and_gradient_alone() -> None:
    groups = sampled_groups(small_model(0))
    split = []
    for g in groups:
        members = []
        for r in g.rollouts:
            (s,) = r.trajectory.segments
            first, second = s.mask.copy(), s.mask.copy()
            first[20:], second[:20] = False, False
            parts = [segment(r.id, i, s.ids, m, s.logprobs) for i, m in enumerate((first, second))]
            members.append(rollout(r.id, r.reward, parts))
        split.append(group(g.id, members))
    model = small_model(1)
    one, two = plan_step(groups, PlanConfig()), plan_step(split, PlanConfig())
    assert len(two.rows) == 2 * len(one.rows)
    loss, grad = gradients(model, one)
    other_loss, other_grad = gradients(model, two)
    assert abs(loss - other_loss) < 1e-6
    assert gap(grad, other_grad) < 1e-6


def test_logprobs_equal_transformers_on_whole_sequences(tmp_path: Path) -> None:
    model = small_model()
    save_model(model, tmp_path)
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    groups = sampled_groups(model, temperature=0.8)
    plan = plan_step(groups, PlanConfig(token_budget=150))
    assert max(b.prefix for b in plan.batches) >= 12
    ours = Trainer(model, TrainConfig(temperature=0.8)).logprobs(plan)
    for row, found in zip(plan.rows, ours, strict=True):
        ids = torch.from_numpy(row.ids.astype(np.int64))
        with torch.no_grad():
            logp = torch.log_softmax(theirs(ids[None]).logits[0] / 0.8, -1)
        at = np.flatnonzero(row.mask)
        assert (logp[at - 1, ids[at]] - found).abs().max() < 2e-5


def test_a_step_reports_agreement_and_moves_the_policy_the_right_way() -> None:
    model = small_model()
    plan = plan_step(sampled_groups(model), PlanConfig())
    trainer = Trainer(model, TrainConfig(optim=OptimConfig(lr=1e-3, warmup_steps=2)))
    before = [x.sum() for x in trainer.logprobs(plan)]
    result = trainer.step(plan)
    after = [x.sum() for x in trainer.logprobs(plan)]
    assert (result.version, result.optimizer_steps, result.skipped) == (1, 1, "")
    assert 0 < result.max_logprob_gap < 1e-5
    assert result.mismatch_kl < 1e-9
    assert result.tokens == plan.ledger.trained
    assert result.lr == pytest.approx(5e-4)
    assert result.clip_fraction == 0.0
    assert result.entropy > 0.1
    assert result.grad_norm > 0
    moved = sum(float(b - a) * row.advantage for a, b, row in zip(before, after, plan.rows, strict=True))
    assert moved > 0


def test_the_same_plan_gives_the_same_bits() -> None:
    ends = []
    for _ in range(2):
        model = small_model()
        trainer = Trainer(model, TrainConfig(epochs=2))
        trainer.step(plan_step(sampled_groups(model), PlanConfig(token_budget=100)))
        ends.append(weights(model))
    assert same(*ends)
    assert not same(ends[0], weights(small_model()))


def test_a_step_is_deterministic_without_filling_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    trainer, settings, seen = Trainer(model, TrainConfig()), torch.utils.deterministic, []
    update = trainer.optimiser.update

    def looked_at(step: int) -> float:
        seen.append((torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory))
        return update(step)

    monkeypatch.setattr(trainer.optimiser, "update", looked_at)
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # of no step, whatever ran in this process before
    monkeypatch.setattr(settings, "fill_uninitialized_memory", True)
    trainer.step(plan_step(sampled_groups(model), PlanConfig(token_budget=100)))
    assert seen == [(2, False)]
    after = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(mode)
    assert after == (1, True)


def wrong(plan: StepPlan, change: float, tokens: int = 1) -> StepPlan:
    """The plan with some logprobs of one row changed."""
    row = plan.rows[4]
    mu = row.logprobs.copy()
    mu[18 : 18 + tokens] += np.float32(change)
    rows = (*plan.rows[:4], dataclasses.replace(row, logprobs=mu), *plan.rows[5:])
    return dataclasses.replace(plan, rows=rows)


def test_a_wrong_logprob_is_named_and_nothing_changes() -> None:
    model = small_model()
    plan = plan_step(sampled_groups(model), PlanConfig())
    trainer = Trainer(model, TrainConfig())
    before = weights(model)
    for change in (-3e-3, math.nan):
        with pytest.raises(TrainError) as caught:
            trainer.step(wrong(plan, change))
        line = f"rollout {plan.rows[4].rollout_id} segment 0 token 18: trainer and sampler differ by"
        assert str(caught.value).startswith(line)
        assert same(before, weights(model))
        assert (trainer.version, trainer.steps) == (0, 0)
    assert trainer.step(wrong(plan, -5e-5)).max_logprob_gap == pytest.approx(5e-5, abs=1e-5)


def test_more_tokens_apart_than_rounding_explains_are_a_fault() -> None:
    model = small_model()
    plan = plan_step(sampled_groups(model), PlanConfig())
    trainer, before = Trainer(model, TrainConfig()), weights(model)
    total = plan.ledger.trained
    text = rf"by more than 0.0001 in 2 of {total} tokens, for one rollout \S+ segment 0 token 1[89]: "
    with pytest.raises(TrainError, match=f"{text}.* no update"):
        trainer.step(wrong(plan, -3e-4, tokens=2))
    assert same(before, weights(model))
    assert (trainer.version, trainer.steps) == (0, 0)


@pytest.mark.parametrize(("loss", "epochs"), [("dppo", 1), ("ppo_clip", 3)])
def test_a_token_apart_by_rounding_is_not_trained(loss: LossName, epochs: int) -> None:
    """The update is that of a plan whose row has the same weight and does not ask for the token at all."""
    ends, results = [], []
    for without in (False, True):
        model = small_model()
        plan = wrong(plan_step(sampled_groups(model), PlanConfig()), -3e-4)
        if without:
            mask = plan.rows[4].mask.copy()
            mask[18] = False
            rows = (*plan.rows[:4], dataclasses.replace(plan.rows[4], mask=mask), *plan.rows[5:])
            plan = dataclasses.replace(plan, rows=rows)
        config = TrainConfig(epochs=epochs, loss=LossConfig(loss=loss), optim=OptimConfig(lr=1e-3))
        results.append(Trainer(model, config).step(plan))
        ends.append(weights(model))
    found, asked = results
    assert (found.mismatched, asked.mismatched) == (1, 0)
    assert found.tokens == asked.tokens == plan.ledger.trained - 1
    assert found.max_logprob_gap < 1e-5
    assert found.max_logprob_gap_seen == pytest.approx(3e-4, abs=1e-5), "excluded tokens are reported too"
    assert asked.max_logprob_gap_seen == asked.max_logprob_gap
    for name, tensor in ends[0].items():
        assert torch.allclose(tensor, ends[1][name], atol=1e-7, rtol=1e-5), name


def test_tokens_of_older_versions_are_not_held_against_the_sampler() -> None:
    model = small_model()
    plan = plan_step(sampled_groups(model, version=3), PlanConfig())
    result = Trainer(model, TrainConfig(max_staleness=2), version=5).step(wrong(plan, -0.5))
    assert (result.max_logprob_gap, result.mismatch_kl, result.version) == (0.0, 0.0, 6)


@pytest.mark.parametrize(("at", "staleness", "oldest"), [(4, 0, 4), (2, 0, 2), (5, 1, 4)])
def test_a_token_of_a_version_that_cannot_be_here_changes_nothing(
    at: int, staleness: int, oldest: int
) -> None:
    """Sampled by version 3: too old for the trainer, or newer than it."""
    model = small_model()
    plan = plan_step(sampled_groups(model, version=3), PlanConfig())
    trainer = Trainer(model, TrainConfig(max_staleness=staleness), version=at)
    before = weights(model)
    text = rf"token 17 was sampled by version 3, the trainer is at {at} and accepts none older than {oldest}"
    with pytest.raises(TrainError, match=text):
        trainer.step(plan)
    assert same(before, weights(model))
    assert trainer.version == at


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_loss_that_is_not_finite_changes_nothing(epochs: int) -> None:
    model = small_model()
    plan = plan_step(sampled_groups(model), PlanConfig())
    # an older version than the trainer's: no gap check
    trainer = Trainer(model, TrainConfig(epochs=epochs, max_staleness=1), version=1)
    start = weights(model)
    with pytest.raises(BadStepError, match=r"step 0: loss -?(nan|inf), gradient norm nan: no update"):
        trainer.step(wrong(plan, -1e9))
    assert same(start, weights(model))
    assert trainer.optimiser.tensors() == {}


@pytest.mark.parametrize("version", [0, 1])
def test_a_bad_step_is_skipped_where_that_is_configured(version: int) -> None:
    """Version 0: the gap over the limit; 1: an older token, whose loss is not finite."""
    model = small_model()
    plan = plan_step(sampled_groups(model), PlanConfig())
    trainer = Trainer(model, TrainConfig(max_staleness=1, on_bad_step="skip"), version=version)
    start = weights(model)
    result = trainer.step(wrong(plan, -1e9))
    assert (result.bad, result.version, result.optimizer_steps) == (True, version, 0)
    assert "no update" in result.skipped
    assert same(start, weights(model))
    assert not trainer.step(plan).bad


def test_a_failure_after_the_first_of_two_updates_takes_that_one_back() -> None:
    model = small_model()
    plan = plan_step(sampled_groups(model, version=9), PlanConfig())
    trainer = Trainer(model, TrainConfig(epochs=2, max_staleness=2), version=10)
    trainer.step(plan)
    before, state = weights(model), {n: t.clone() for n, t in trainer.optimiser.tensors().items()}
    names, adam, _ = trainer.optimiser._parts[0]
    trainer.optimiser._parts[0] = (names, adam, math.inf)
    with pytest.raises(TrainError, match="step 2: loss nan"):
        trainer.step(plan)
    assert same(before, weights(model))
    assert same(state, trainer.optimiser.tensors())
    assert (trainer.version, trainer.steps) == (11, 2)


def test_nothing_to_train_is_skipped_and_too_long_is_refused() -> None:
    model = small_model()
    trainer = Trainer(model, TrainConfig())
    before = weights(model)
    plan = plan_step(sampled_groups(model), PlanConfig(min_groups=9))
    result = trainer.step(plan)
    assert result.skipped == "3 useful groups of 3; 9 are needed"
    assert (result.version, result.optimizer_steps, result.tokens) == (0, 0, 0)
    long = CONFIG.max_position_embeddings + 1
    mask = np.zeros(long, bool)
    mask[-1] = True
    members = [
        rollout(f"g/0/{k}", float(k), [segment(f"g/0/{k}", 0, [1] * long, mask, [-1.0] * long)])
        for k in (0, 1)
    ]
    with pytest.raises(TrainError, match="257 tokens exceed the model's 256 positions"):
        trainer.step(plan_step([group("g/0", members)], PlanConfig()))
    assert same(before, weights(model))
