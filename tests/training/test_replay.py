"""A sampler's choice of experts replayed in the trainer, for every architecture of the zoo with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_zoo import TWO, ZOO, saved
from test_model_zoo import CONFIG, LORA, opened
from torch import Tensor, nn
from train_lab import group, rollout, segment

from insitu.errors import ConfigError, TrainError
from insitu.types import ExpertArray
from insitu_train.learner.serialization import decode_plan, encode_plan
from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.model.experts import routers
from insitu_train.model.hf import HfPolicy, decoder_layers, open_hf
from insitu_train.model.load import open_policy
from insitu_train.options import PolicyConfig
from insitu_train.plan.prefix import sort_rows
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.numeric]

ROUTED = [name for name, tried in ZOO.items() if {"num_experts", "num_local_experts", "n_routed_experts"}
          & set(tried.changed)]  # fmt: skip
LENGTHS = (13, 18, 22)


@pytest.fixture(scope="module", params=ROUTED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tried = ZOO[request.param]
    return saved(tmp_path_factory.mktemp("routed"), tried.kind, **TWO, **tried.changed)


class Sampler:
    """The engine: the model in float64, written apart from the trainer's replay, with routers that choose
    what `choose` draws for a token, as those of an engine that rounds otherwise would."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = (
            AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", experts_implementation="eager"
            )
            .double()
            .eval()
        )
        self.layers = decoder_layers(self.model)
        self.given: ExpertArray | None = None
        for index, layer in enumerate(self.layers):
            for router in routers(layer):
                self._force(router, index)

    def shape(self) -> tuple[int, int, int]:
        router = next(router for layer in self.layers for router in routers(layer))
        return len(self.layers), router.top_k, router.num_experts

    def _force(self, router: nn.Module, index: int) -> None:
        inner = type(router).forward

        def forward(*args: Tensor) -> object:
            assert self.given is not None
            wanted = torch.from_numpy(self.given[:, index].astype(np.int64))
            real = torch.topk

            def topk(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> object:
                found = real(scores, k, dim=dim, sorted=sorted)
                if scores.shape != (len(wanted), router.num_experts):
                    return found
                chosen = torch.where(wanted < 0, found.indices, wanted)
                return torch.return_types.topk((scores.gather(-1, chosen), chosen))

            torch.topk = topk
            try:
                return inner(router, *args)
            finally:
                torch.topk = real

        router.forward = forward

    def logprobs(self, ids: np.ndarray, experts: ExpertArray) -> Tensor:
        self.given = experts
        row = torch.from_numpy(ids.astype(np.int64))
        found = self.model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
        return found[:-1].gather(1, row[1:, None])[:, 0]


def choose(rng: np.random.Generator, tokens: int, shape: tuple[int, int, int]) -> ExpertArray:
    layers, k, count = shape
    drawn = np.argsort(rng.random((tokens, layers, count)), axis=-1)[..., :k]
    return drawn.astype(np.int16)


def a_plan(sampler: Sampler, layout: str = "prefix", keep: bool = True) -> StepPlan:
    """Rows that share a prompt of nine tokens, which the same experts computed in two of them; the third has
    a token in the middle of which nothing is known."""
    rng = np.random.default_rng(0)
    shape = sampler.shape()
    prompt, routed = rng.integers(3, 64, 9), choose(rng, 9, shape)
    members = []
    for k, length in enumerate(LENGTHS):
        ids = np.concatenate([prompt, rng.integers(3, 64, length - 9)]).astype(np.int32)
        experts = choose(rng, length, shape)
        if k < 2:
            experts[:9] = routed
        else:
            experts[11] = -1
        experts[-1] = -1
        with torch.no_grad():
            mu = np.append(0.0, sampler.logprobs(ids, experts).numpy())
        row = segment(f"train/0/0/{k}", 0, ids, np.arange(length) >= 10, mu)
        members.append(rollout(row.rollout_id, float(k), [replace(row, experts=experts if keep else None)]))
    return plan_step([group("train/0/0", members)], PlanConfig(layout=layout))


def worst(trainer: Trainer, plan: StepPlan) -> float:
    found = trainer.logprobs(plan)
    return max(float((logp - torch.from_numpy(row.logprobs[row.mask])).abs().max())
               for logp, row in zip(found, plan.rows, strict=True))  # fmt: skip


@pytest.mark.parametrize("layout", ["prefix", "tree"])
def test_log_probabilities_are_the_engines_and_without_replay_they_are_not(folder: Path, layout: str) -> None:
    sampler, trainer = Sampler(folder), Trainer(opened(folder), CONFIG)
    trainer.fit = None
    assert worst(trainer, a_plan(sampler, layout)) < 1e-4
    assert worst(trainer, a_plan(sampler, layout, keep=False)) > 1e-2
    with pytest.raises(TrainError, match="max_logprob_gap"):
        trainer.step(a_plan(sampler, layout, keep=False))
    assert trainer.step(a_plan(sampler, layout)).max_logprob_gap < 1e-4


@pytest.mark.parametrize(
    "techniques", [PLAIN, MemoryOptions(checkpoint=True), MemoryOptions(checkpoint=True, tile_mlp=4)], ids=str
)
def test_gradients_are_those_of_float64_with_the_given_experts(
    folder: Path, techniques: MemoryOptions
) -> None:
    sampler = Sampler(folder)
    plan = a_plan(sampler)
    total = torch.zeros((), dtype=torch.float64)
    for row in plan.rows:
        assert row.experts is not None
        logp = sampler.logprobs(row.ids, row.experts)[torch.from_numpy(row.mask[1:])]
        mu = torch.from_numpy(row.logprobs[row.mask]).double()
        given = LossInputs(mu, torch.full_like(logp, row.advantage))
        total = total + row.weight * token_loss(logp, given, CONFIG.loss).loss.sum()
    total.backward()
    exact = {n: p.grad for n, p in sampler.model.named_parameters() if p.grad is not None}
    policy = opened(folder)
    trainer = Trainer(policy, CONFIG)
    trainer.fit = None
    policy.techniques = techniques
    assert trainer.gradients(plan) == pytest.approx(float(total.detach()), abs=1e-5)
    found = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in exact.values())
    assert max(float((found[n] - g).abs().max()) for n, g in exact.items() if n in found) / scale < 1e-4
    gates = [n for n in found if "gate.weight" in n or "router.weight" in n]
    assert any(found[n].abs().max() > 0 for n in gates), "the routers learn too"


def test_adapters_replay_too(folder: Path) -> None:
    trainer = Trainer(opened(folder, LORA), CONFIG)
    trainer.fit = None
    assert trainer.step(a_plan(Sampler(folder))).max_logprob_gap < 1e-4


def test_a_plan_keeps_its_experts_on_the_way_to_the_learner(folder: Path) -> None:
    plan = a_plan(Sampler(folder))
    arrays = encode_plan(plan)
    again = decode_plan(arrays)
    for row, read in zip(plan.rows, again.rows, strict=True):
        assert read.experts is not None
        assert np.array_equal(read.experts, row.experts)
    assert plan.digest != a_plan(Sampler(folder), keep=False).digest
    arrays["<i2"] = np.zeros_like(arrays["<i2"])
    with pytest.raises(TrainError, match="checksum"):
        decode_plan(arrays)


def test_a_token_is_shared_only_where_the_same_experts_computed_it() -> None:
    a, b = np.arange(8, dtype=np.int32), np.append(np.arange(8), 9).astype(np.int32)
    one = np.zeros((8, 2, 2), np.int16)
    two = np.zeros((9, 2, 2), np.int16)
    assert sort_rows([a, b], [one, two]).shared == (0, 8)
    two[5, 1, 0] = 3
    assert sort_rows([a, b], [one, two]).shared == (0, 5)
    assert sort_rows([a, b], [one, None]).shared == (0, 0)
    assert sort_rows([a, b], [None, None]).shared == (0, 8)


def open_replaying(folder: Path) -> HfPolicy:
    return open_hf(folder, device=torch.device("cpu"), dtype=torch.float32, replay=True)


def test_opening_says_what_a_run_risks_or_proves_that_experts_are_taken(folder: Path) -> None:
    assert any("engine.replay_experts = true" in line for line in opened(folder).notices)
    assert not any("experts" in line for line in open_replaying(folder).notices)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"engine.replay_experts: Qwen2ForCausalLM has no routers"):
        open_replaying(saved(tmp_path, "qwen2", **TWO))
    tried = ZOO["Qwen3-MoE"]
    folder = saved(tmp_path, tried.kind, **TWO, **tried.changed)
    plan = a_plan(Sampler(folder))
    other = saved(tmp_path / "other", tried.kind, **tried.changed)
    with pytest.raises(TrainError, match="in 2 layers, the trained model has 4 in 4"):
        Trainer(opened(other), CONFIG).logprobs(plan)


def test_the_built_in_model_has_no_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the built-in model has no experts"):
        open_policy(tmp_path, PolicyConfig(replay=True))
