"""Every architecture of model_zoo.py: opened, its loss and gradients those of transformers itself, trained in
full and by adapters, its memory predicted, and its files read by transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from model_zoo import TWO, ZOO, Architecture, saved, table
from test_memory import long_plan, measured
from torch import Tensor
from train_lab import group, rollout, segment
from transformers import AutoModelForCausalLM

from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.memory.plan import load_of
from insitu_train.memory.predict import MemoryModel
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.options import Lora, OptimConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer.trainer import Trainer
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest

pytestmark = [pytest.mark.slow, pytest.mark.numeric]

CONFIG = TrainConfig(optim=OptimConfig(lr=1e-2), threads=1, max_logprob_gap=1e-3)
LORA = Lora(rank=2, alpha=4.0)
WIDER = {"hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 1024}


@pytest.fixture(scope="module", params=ZOO)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Architecture, Path]:
    tried = ZOO[request.param]
    return tried, saved(tmp_path_factory.mktemp("zoo"), tried.kind, **TWO, **tried.changed)


def opened(folder: Path, lora: Lora | None = None) -> HfPolicy:
    return open_hf(folder, device=torch.device("cpu"), dtype=torch.float32, lora=lora)


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def own_logprobs(model: torch.nn.Module, ids: np.ndarray) -> Tensor:
    """Of each id after the first, by transformers: one row, no padding, the model's own head."""
    row = torch.from_numpy(ids.astype(np.int64))
    found = model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
    return found[:-1].gather(1, row[1:, None])[:, 0]


def a_plan(model: torch.nn.Module, layout: str = "prefix") -> StepPlan:
    """Two groups of rows that share prompts, longer than the zoo's windows, as the model samples them."""
    rng = np.random.default_rng(0)
    system, groups = rng.integers(3, 64, 9), []
    for g in range(2):
        prompt, members = rng.integers(3, 64, 4), []
        for k in range(2):
            ids = np.concatenate([system, prompt, rng.integers(3, 64, 7 + 5 * k + g)]).astype(np.int32)
            mask = np.arange(len(ids)) >= 13
            mask[15] = False
            with torch.no_grad():
                mu = np.append(0.0, own_logprobs(model, ids).numpy())
            name = f"train/0/{g}/{k}"
            members.append(rollout(name, float(k), [segment(name, 0, ids, mask, mu)]))
        groups.append(group(f"train/0/{g}", members))
    return plan_step(groups, PlanConfig(layout=layout))


def own_gradients(model: torch.nn.Module, plan: StepPlan) -> tuple[float, dict[str, Tensor]]:
    """The loss of a plan and its gradients, by transformers and autograd alone."""
    total = torch.zeros(())
    for row in plan.rows:
        logp = own_logprobs(model, row.ids)[torch.from_numpy(row.mask[1:])]
        given = LossInputs(torch.from_numpy(row.logprobs[row.mask]), torch.full_like(logp, row.advantage))
        total = total + row.weight * token_loss(logp, given, CONFIG.loss).loss.sum()
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_loss_and_gradients_are_those_of_transformers(made: tuple[Architecture, Path]) -> None:
    tried, folder = made
    policy, model = opened(folder), plain(folder)
    assert policy.by_rows == tried.by_rows
    assert any("each row runs alone" in line for line in policy.notices) == tried.by_rows
    loss, exact = own_gradients(model, a_plan(model))
    trainer = Trainer(policy, CONFIG)
    trainer.fit = None
    found_loss = trainer.gradients(a_plan(model))
    found = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in exact.values())
    assert found_loss == pytest.approx(loss, abs=1e-5)
    assert {n for n, g in found.items() if g.any()} == {n for n, g in exact.items() if g.any()}
    worst = max(float((found[n] - g).abs().max()) for n, g in exact.items() if n in found) / scale
    assert worst < 1e-4


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.full), LORA], ids=["full", "lora"])
def test_it_trains_and_transformers_reads_what_it_wrote(
    made: tuple[Architecture, Path], lora: Lora | None, tmp_path: Path
) -> None:
    tried, folder = made
    policy = opened(folder, lora)
    trainer = Trainer(policy, CONFIG)
    if policy.lora is not None:
        trainer.fit = None
        assert set(policy.lora.targets) == set(tried.targets)
    plan = a_plan(plain(folder))
    first = trainer.step(plan)
    assert not first.skipped
    assert first.max_logprob_gap < 1e-3
    found = trainer.logprobs(plan)
    assert max(float((logp - torch.from_numpy(row.logprobs[row.mask])).abs().max())
               for logp, row in zip(found, plan.rows, strict=True)) > 1e-3  # fmt: skip
    export(policy, ExportRequest(folder=tmp_path / "out", version=1), folder)
    again = plain(tmp_path / "out")
    for logp, row in zip(found, plan.rows, strict=True):
        theirs = own_logprobs(again, row.ids)[torch.from_numpy(row.mask[1:])].detach()
        assert float((logp - theirs).abs().max()) < 1e-3


@pytest.mark.parametrize("techniques", [PLAIN, MemoryOptions(checkpoint=True)], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Qwen3.5" else pytest.mark.full) for name in ZOO]
)
def test_predicted_memory_is_what_a_step_takes(tmp_path: Path, name: str, techniques: MemoryOptions) -> None:
    tried = ZOO[name]
    policy = opened(saved(tmp_path, tried.kind, **{**TWO, **tried.changed, **WIDER}))
    trainer = Trainer(policy, CONFIG.changed(max_logprob_gap=100.0, max_staleness=9))
    plan = trainer._laid_out(long_plan(800))
    found = measured(trainer, plan, techniques)
    model = MemoryModel(
        policy.model.config, dtype=torch.float32, lora=None, kernels="cpu",
        attention=policy.model.config._attn_implementation,
    )  # fmt: skip
    predicted = model.predict(load_of(plan, plan.batches[0]), techniques)
    assert predicted.peak - predicted.states == pytest.approx(found - predicted.states, rel=0.01)


def test_the_page_shows_this_record() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert table() in page, "run: python tests/training/model_zoo.py"
