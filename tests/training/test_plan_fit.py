"""Which memory techniques are chosen, by few dry runs; what is refused, on which rank, and in which words."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_hf_policy import LOOSE, a_plan, opened
from test_memory import LORA, a_folder, limited, long_plan
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen3Config,
)

from insitu.errors import TrainError
from insitu_train.learner import ranks as joining
from insitu_train.learner.rank_process import Place
from insitu_train.memory.meta_run import BatchShape
from insitu_train.memory.plan import LADDER, MemoryPlanner, load_of
from insitu_train.memory.predict import GIB, MemoryModel, MemoryPrediction
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.options import Lora, TrainConfig
from insitu_train.trainer.distributed import Ranks
from insitu_train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow

# --------------------------------------------------------------------------- choices


class FixedCost:
    """A model whose predictions are given, in GiB, per rung of LADDER."""

    peaks = (900, 150, 140, 110, 88, 79, 49, 45)
    hosts = (0, 0, 0, 32, 0, 0, 32, 64)

    def predict(self, load: BatchShape, techniques: MemoryOptions, *, first: bool = True) -> MemoryPrediction:
        at = list(LADDER).index(techniques)
        size = self.peaks[at] * GIB
        return MemoryPrediction(states=0, activations=size, update=0, host=self.hosts[at] * GIB)


def test_a_step_fits_where_only_the_last_technique_lacks_host_memory(tmp_path: Path) -> None:
    policy, plan = opened(a_folder("wide", tmp_path / "model")), long_plan(800)
    fit = MemoryPlanner(policy.model.config, policy, limit=130 * GIB, host=48 * GIB)
    fit._model, fit._ladder = FixedCost(), list(LADDER)  # type: ignore[assignment]
    load = load_of(plan, plan.batches[0])
    assert fit.choose(load) == LADDER[3]
    fit.limit = 48 * GIB
    with pytest.raises(
        TrainError, match=r"needs 64\.0 GiB of the host's memory to fit on cpu, 48\.0 GiB are"
    ):
        fit.plan(plan)


@pytest.mark.full
def test_few_shapes_are_run_dry(tmp_path: Path) -> None:
    policy = opened(a_folder("wide", tmp_path / "model"))
    fit = MemoryPlanner(policy.model.config, policy, limit=1 << 40, host=0)
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = {n: int(rng.integers(100, 900)) for n in ("prefix", "width", "trained")}
        assert fit.choose(BatchShape(rows=int(rng.integers(2, 9)), **sizes)) == PLAIN
    assert len(fit._model._found) < 40


def test_what_fits_to_the_byte_is_not_given_costlier_techniques(tmp_path: Path) -> None:
    policy, load = (
        opened(a_folder("wide", tmp_path / "model")),
        BatchShape(prefix=0, rows=1, width=901, trained=333),
    )
    fit = MemoryPlanner(policy.model.config, policy, limit=1 << 40, host=0)
    fit.limit = fit._need(fit._model, load, PLAIN, first=True).device
    assert fit.choose(load) == PLAIN
    fit.limit -= 1
    assert fit.choose(BatchShape(prefix=0, rows=1, width=901, trained=334)) != PLAIN


def test_moments_come_back_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, plan = limited(a_folder("wide", tmp_path / "model"), 1.0), long_plan(800)
    away = MemoryOptions(checkpoint=True, offload_optimizer=True)
    for techniques in (away, PLAIN):
        monkeypatch.setattr(MemoryPlanner, "plan", lambda self, plan, t=techniques: [t] * len(plan.batches))
        trainer.step(plan)
        assert trainer.optimiser._parked == (techniques == away)


# --------------------------------------------------------------------------- several ranks


class Two(Ranks):
    """The first of two ranks, whose attempts are sent to the other."""

    world = 2

    def __init__(self) -> None:
        self.tries = 0

    def attempt(self, work: Callable[[], Any]) -> Any:
        self.tries += 1
        return super().attempt(work)


def test_a_refusal_on_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    trainer, plan = limited(a_folder("wide", tmp_path / "model"), 0.008), long_plan(800)
    trainer.ranks = two = Two()
    with pytest.raises(TrainError, match="GiB are available"):
        trainer.step(plan)
    assert two.tries == 1


def test_ranks_share_the_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu_train.memory.plan.available_memory", lambda: 8 * GIB)
    policy = opened(a_folder("wide", tmp_path / "model"))
    alone, both = (MemoryPlanner.of(policy, 0.0, ranks=n) for n in (1, 2))
    assert both.limit == pytest.approx(alone.limit / 2, rel=0.01)
    assert both._host == 4 * GIB
    spread = MemoryPlanner.of(policy, 0.0, ranks=16, here=2)
    assert (spread.limit, spread._host, spread._ranks) == (both.limit, both._host, 16)


def test_ranks_of_other_hosts_take_no_memory_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu_train.memory.plan.available_memory", lambda: 8 * GIB)
    monkeypatch.setattr(joining, "join", lambda *given, **named: Two())
    place = Place(rank=0, world=2, index=0, here=1, store="")
    joined = joining._join(place, TrainConfig(), tmp_path / "store")
    alone, first = (
        Trainer(opened(a_folder("wide", tmp_path / str(n))), TrainConfig(), ranks=one).fit
        for n, one in enumerate((None, joined))
    )
    assert alone is not None
    assert first is not None
    assert (first.limit, first._host) == (alone.limit, 8 * GIB)


def test_a_sharded_rank_holds_its_part_and_what_it_gathers() -> None:
    """Qwen3-14B in full: 16 bytes a parameter are 220 GiB, of which each of eight GPUs has an eighth."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, intermediate_size=17408, tie_word_embeddings=False,
    )  # fmt: skip
    whole, part = (
        MemoryModel(config, dtype=torch.bfloat16, lora=None, kernels="cuda", shards=n) for n in (1, 8)
    )
    attention, norms = 5120 * 128 * 2 * (40 + 8), 2 * 5120 + 2 * 128
    layer, outside = attention + 3 * 5120 * 17408 + norms, 2 * 151936 * 5120 + 5120
    every, load = 40 * layer + outside, BatchShape(prefix=0, rows=1, width=16000, trained=4000)
    assert part._buffers == 3 * 4 * outside + (3 * 2 + 2 + 2 * 4) * layer
    alone, of_eight = (m.predict(load, LADDER[4], first=False) for m in (whole, part))
    assert (alone.states, of_eight.states) == (16 * every, 16 * every // 8)
    assert of_eight.activations == alone.activations + part._buffers
    assert of_eight.update == of_eight.states + 2 * 4 * 151936 * 5120 // 8
    assert part.predict(load, LADDER[4]) == of_eight, "its gradients come in parts, from the first on"
    assert of_eight.peak < 70 * GIB < 200 * GIB < alone.peak


def test_what_fits_on_sharded_ranks_only_is_not_refused_there(tmp_path: Path) -> None:
    policy = opened(a_folder("deep", tmp_path / "model"))
    load, config = BatchShape(prefix=0, rows=1, width=64, trained=16), policy.model.config
    alone = MemoryPlanner(config, policy, limit=1 << 40, host=1 << 40)
    needed = min(alone._need(alone._model, load, t, first=False).device for t in alone._ladder)
    fit = MemoryPlanner(config, policy, limit=int(0.8 * needed), host=1 << 40)
    assert fit.choose(load, first=False) is None
    policy.shards = 4
    assert (
        MemoryPlanner(config, policy, limit=int(0.8 * needed), host=1 << 40).choose(load, first=False)
        is not None
    )


# --------------------------------------------------------------------------- other architectures


def test_what_cannot_be_run_without_content_is_refused_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = opened(a_folder("wide", tmp_path / "model"))

    def no(*args: Any) -> None:
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(MemoryModel, "_pass", no)
    with pytest.raises(TrainError, match="^Qwen3ForCausalLM does not run on meta tensors.*: no kernel$"):
        Trainer(policy, LOOSE)


def test_no_adapters_are_suggested_where_the_layers_have_other_names(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    with pytest.raises(TrainError, match="GiB are available") as caught:
        limited(tmp_path / "neox", 0.004).step(long_plan(800))
    assert "lora" not in str(caught.value)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_dropped_model_is_gone_at_once(tmp_path: Path, lora: Lora | None) -> None:
    """A garbage collector that comes by some minutes later is too late for the next model on a GPU."""
    folder = a_folder("wide", tmp_path / "model")
    gc.collect()
    gc.disable()
    try:
        trainer = Trainer(opened(folder, lora=lora), LOOSE)
        trainer.step(a_plan())
        weight = weakref.ref(trainer.model.model.model.layers[0].mlp.gate_proj.weight)  # type: ignore[attr-defined]
        del trainer
        assert weight() is None
    finally:
        gc.enable()
