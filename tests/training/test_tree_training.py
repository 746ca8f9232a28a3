"""Training over prefix trees: the same losses, gradients and steps as over padded rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from train_lab import VOCAB, group, rollout, sampled_groups, segment, slow_logprobs, small_model

from insitu.config import load_config
from insitu.config.training import LossConfig
from insitu.errors import TrainError
from insitu.types import Group
from insitu_train.embedded.model import Qwen3
from insitu_train.memory.plan import load_of
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer.batch import make_batch
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

Named = dict[str, torch.Tensor]


def forked_groups(model: Qwen3) -> list[Group]:
    """Rollouts of several segments: what a fork repeats is trained once; two rollouts sampled the same."""
    rng = np.random.default_rng(3)
    made = []
    for g in range(2):
        prompt = rng.integers(0, VOCAB, 20).tolist()
        members = []
        for k in range(4):
            name = f"train/0/{g}/{k}"
            main = prompt + ([7, 8, 9] if k < 2 else rng.integers(0, VOCAB, 3).tolist())
            main += rng.integers(0, VOCAB, 10).tolist()
            side = main[:26] + rng.integers(0, VOCAB, 6).tolist()
            parts = []
            for i, (ids, chosen) in enumerate([(main, [20, 21, 22, 30, 31]), (side, [28, 29])]):
                mask = np.zeros(len(ids), bool)
                mask[chosen] = True
                with torch.no_grad():
                    mu = slow_logprobs(model, np.array(ids, np.int32)).numpy()
                parts.append(segment(name, i, ids, mask, mu))
            members.append(rollout(name, float(k % 2) + 0.1 * k, parts))
        made.append(group(f"train/0/{g}", members))
    return made


def gradients(model: Qwen3, plan: StepPlan, config: TrainConfig) -> tuple[float, Named]:
    loss = Trainer(model, config).gradients(plan)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["dppo", "gspo"])
@pytest.mark.parametrize(
    "budget", [pytest.param(1, marks=pytest.mark.full), 90, pytest.param(10_000, marks=pytest.mark.full)]
)
def test_loss_and_gradients_are_those_of_padded_rows(name: str, budget: int) -> None:
    model, sampler = small_model(1), small_model(0)
    groups = [*sampled_groups(sampler), *(dataclasses.replace(g, id=f"f{g.id}") for g in _renamed(sampler))]
    config = TrainConfig(loss=LossConfig(loss=name))  # type: ignore[arg-type]
    padded = plan_step(groups, PlanConfig(token_budget=10_000))
    tree = plan_step(groups, PlanConfig(token_budget=budget, layout="tree"))
    assert {b.layout for b in tree.batches} == {"tree"}
    loss, expected = gradients(model, padded, config)
    found_loss, found = gradients(model, tree, config)
    assert found_loss == pytest.approx(loss, abs=1e-6)
    for key, grad in expected.items():
        assert float((found[key] - grad).abs().max() / grad.abs().max()) < 1e-5, key
    for a, b in zip(
        Trainer(model, config).logprobs(padded), Trainer(model, config).logprobs(tree), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5)


def _renamed(model: Qwen3) -> list[Group]:
    return [
        dataclasses.replace(
            g,
            rollouts=tuple(
                dataclasses.replace(
                    r,
                    id=f"f{r.id}",
                    trajectory=dataclasses.replace(
                        r.trajectory,
                        segments=tuple(
                            dataclasses.replace(s, rollout_id=f"f{r.id}") for s in r.trajectory.segments
                        ),
                    ),
                )
                for r in g.rollouts
            ),
        )
        for g in forked_groups(model)
    ]


def test_a_tree_computes_fewer_tokens() -> None:
    groups = forked_groups(small_model())
    padded, tree = (plan_step(groups, PlanConfig(layout=layout)) for layout in ("prefix", "tree"))
    assert sum(b.tokens for b in tree.batches) < 0.8 * sum(b.tokens for b in padded.batches)
    # and that is what its memory is predicted from
    assert [load_of(tree, b).tokens for b in tree.batches] == [b.tokens for b in tree.batches]
    assert all(make_batch(tree, b).layout.tokens == b.tokens for b in tree.batches)  # type: ignore[union-attr]


def test_a_step_takes_the_samplers_record_and_refuses_another() -> None:
    model = small_model()
    plan = plan_step(forked_groups(model), PlanConfig(layout="tree"))
    result = Trainer(model, TrainConfig()).step(plan)
    assert result.max_logprob_gap < 1e-5
    assert result.tokens == plan.tokens == 2 * 4 * 7
    wrong = plan_step(forked_groups(small_model(5)), PlanConfig(layout="tree"))
    with pytest.raises(TrainError, match="segment . token .*trainer and sampler differ"):
        Trainer(model, TrainConfig()).step(wrong)


def test_the_layout_is_a_choice_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nlayout = "tree"\n')
    assert PlanConfig.of(load_config(path, [])).layout == "tree"
