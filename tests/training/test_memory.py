"""Predicted memory against every allocation of a real step, on shapes that nothing was fitted to; the choice
of techniques; refusal with numbers instead of running out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_hf_policy import LOOSE, a_plan, opened, trained
from train_lab import small_model
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from insitu.config.training import LossConfig
from insitu.errors import TrainError
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise, load_model, save_model
from insitu_train.embedded.weights import checksum
from insitu_train.loss.fused_head import score
from insitu_train.memory.meta_run import BatchShape
from insitu_train.memory.peak import peak_bytes
from insitu_train.memory.plan import KEPT_FREE, LADDER, MemoryPlanner, load_of
from insitu_train.memory.predict import GIB, BuiltinMemory, MemoryModel
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.model.hf import HfPolicy
from insitu_train.options import Lora, PolicyConfig
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.prefix_tree import build_tree
from insitu_train.plan.step import StepPlan
from insitu_train.trainer.batch import make_batch, states
from insitu_train.trainer.reference import Reference
from insitu_train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow

SHAPES: dict[str, Any] = {
    "wide": Qwen3Config(
        vocab_size=2048, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=320, tie_word_embeddings=True,
    ),
    "deep": Qwen3Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=16, intermediate_size=256, tie_word_embeddings=False,
    ),
    "llama": LlamaConfig(
        vocab_size=1024, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=200,
    ),
}  # fmt: skip
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


def a_folder(shape: str, folder: Path) -> Path:
    config = SHAPES[shape]
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen3ForCausalLM
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return folder


def measured(trainer: Trainer, plan: StepPlan, techniques: MemoryOptions) -> int:
    """Bytes of weights, moments and of the most that a second step holds beside them."""
    trainer.step(plan)
    trainer.fit, trainer.model.techniques = None, techniques  # type: ignore[attr-defined]
    trainer._chosen = {}
    held = sum(p.nbytes for _, p in trainer.model.named_parameters())
    held += sum(t.nbytes for t in trainer.optimiser.tensors().values())
    return held + peak_bytes(lambda: trainer.step(plan), torch.device("cpu"))


def long_plan(tokens: int, rows: int = 1) -> StepPlan:
    """One micro-batch of `rows` rows that share their first half."""
    plan = a_plan(100000)
    row = plan.rows[0]
    rng = torch.Generator().manual_seed(1)
    made = []
    shared = torch.randint(0, 50, (tokens // 2,), generator=rng)
    for k in range(rows):
        ids = torch.cat([shared, torch.randint(0, 50, (tokens - tokens // 2,), generator=rng)])
        mask = torch.arange(tokens) >= tokens * 3 // 4
        made.append(
            dataclasses.replace(
                row, rollout_id=f"train/0/0/{k}", ids=ids.int().numpy(), mask=mask.numpy(),
                logprobs=torch.where(mask, -1.0, 0.0).numpy(), versions=torch.zeros(tokens).int().numpy(),
            )
        )  # fmt: skip
    batch = dataclasses.replace(
        plan.batches[0], prefix=tokens // 2, rows=tuple(range(rows)), tokens=tokens // 2 * (1 + rows)
    )
    return dataclasses.replace(plan, rows=tuple(made), batches=(batch,))


@pytest.mark.parametrize(
    ("shape", "rows", "lora", "dtype", "techniques"),
    [
        ("wide", 3, None, torch.float32, MemoryOptions(checkpoint=True)),
        ("deep", 1, LORA, torch.float32, MemoryOptions(checkpoint=True, tile_mlp=256)),
        ("llama", 1, None, torch.bfloat16, MemoryOptions(checkpoint=True, save_attention=True)),
        pytest.param("wide", 1, None, torch.float32, PLAIN, marks=pytest.mark.full),
        pytest.param("deep", 4, None, torch.float32, PLAIN, marks=pytest.mark.full),
        pytest.param("llama", 2, None, torch.bfloat16, PLAIN, marks=pytest.mark.full),
    ],
)
def test_predicted_memory_is_within_five_percent(
    tmp_path: Path, shape: str, rows: int, lora: Lora | None, dtype: torch.dtype, techniques: MemoryOptions
) -> None:
    folder = a_folder(shape, tmp_path / "model")
    plan = long_plan(800, rows)
    found = measured(Trainer(opened(folder, lora=lora, dtype=dtype), LOOSE), plan, techniques)
    model = MemoryModel(AutoConfig.from_pretrained(folder), dtype=dtype, lora=lora, kernels="cpu")
    predicted = model.predict(load_of(plan, plan.batches[0]), techniques)
    assert predicted.peak == pytest.approx(found, rel=0.05)
    # the pass itself, without the share that any formula has right
    assert predicted.peak - predicted.states == pytest.approx(found - predicted.states, rel=0.06)


def builtin(folder: Path) -> Qwen3:
    shape = ModelConfig(
        vocab_size=2048, hidden_size=96, num_hidden_layers=3, head_dim=24, intermediate_size=256,
        max_position_embeddings=1024,
    )  # fmt: skip
    save_model(initialise(shape, 0), folder)
    return load_model(folder)


@pytest.mark.parametrize(("rows", "layout"), [(1, "prefix"), (3, "prefix"), (3, "tree")])
def test_the_built_in_model_is_predicted_too(tmp_path: Path, rows: int, layout: str) -> None:
    model = builtin(tmp_path / "model")
    plan = long_plan(800, rows)
    if layout == "tree":
        plan = star()
    trainer = Trainer(model, LOOSE)
    trainer.step(plan)
    trainer.fit = None
    found = peak_bytes(lambda: trainer.step(plan), torch.device("cpu"))
    held = sum(p.nbytes for p in model.parameters())
    predicted = BuiltinMemory(model.config).predict(load_of(plan, plan.batches[0]), PLAIN)
    assert predicted.states == 3 * held
    assert predicted.peak - predicted.states == pytest.approx(found, rel=0.05)


def test_a_row_that_the_built_in_model_cannot_train_is_refused_with_numbers(tmp_path: Path) -> None:
    config = LOOSE.changed(policy=PolicyConfig(memory_gib=0.02))
    model = builtin(tmp_path / "model")
    trainer = Trainer(model, config)
    short, long = long_plan(60), long_plan(800)
    assert not trainer.step(short).skipped
    version, before = trainer.version, checksum(model)
    with pytest.raises(TrainError) as caught:
        trainer.step(long)
    said = str(caught.value)
    assert (trainer.version, checksum(model)) == (version, before)
    assert said.startswith("rollout train/0/0/0 segment 0: a micro-batch of 799 tokens")
    numbers = re.search(
        r"needs ([\d.]+) GiB on cpu, ([\d.]+) GiB are available; about (\d+) tokens fit", said
    )
    assert numbers is not None
    assert float(numbers[1]) > float(numbers[2]) == 0.02
    assert 60 < int(numbers[3]) < 799
    assert not trainer.step(long_plan(int(0.7 * int(numbers[3])))).skipped
    assert said.endswith("policy.kind hf has options that need less: no update")


def limited(folder: Path, gib: float) -> Trainer:
    config = LOOSE.changed(policy=PolicyConfig(kind="hf", memory_gib=gib))
    return Trainer(opened(folder), config)


def test_the_least_costly_techniques_that_fit_are_chosen(tmp_path: Path) -> None:
    folder, plan = a_folder("wide", tmp_path / "model"), long_plan(800)
    load = load_of(plan, plan.batches[0])
    roomy = limited(folder, 1.0)
    assert roomy.fit is not None
    assert roomy.fit.plan(plan) == [PLAIN]
    model = MemoryModel(AutoConfig.from_pretrained(folder), dtype=torch.float32, lora=None, kernels="cpu")
    plain = model.predict(load, PLAIN).peak / GIB
    checkpoint = model.predict(load, MemoryOptions(checkpoint=True)).peak / GIB
    trainer = limited(folder, (checkpoint + plain) / 2)
    before = trained(trainer.model)
    assert not trainer.step(plan).skipped
    assert isinstance(trainer.model, HfPolicy)
    assert trainer.model.techniques.checkpoint
    roomy.step(plan)
    after = (trained(trainer.model), trained(roomy.model))
    assert all(torch.allclose(after[0][n], after[1][n], atol=1e-6) for n in before)
    assert any(not torch.equal(before[n], after[0][n]) for n in before)


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    folder, plan = a_folder("wide", tmp_path / "model"), long_plan(800)
    trainer = limited(folder, 0.008)
    before = trained(trainer.model)
    with pytest.raises(TrainError) as caught:
        trainer.step(plan)
    said = str(caught.value)
    assert said.startswith("rollout train/0/0/0 segment 0: a micro-batch of 799 tokens")
    numbers = re.search(
        r"needs ([\d.]+) GiB on cpu with all memory options, ([\d.]+) GiB are available", said
    )
    assert numbers is not None
    assert float(numbers[1]) >= float(numbers[2])
    assert "tokens fit" in said or "weights alone" in said
    assert "policy.lora_rank 16 would need" in said
    assert trainer.version == 0
    assert all(torch.equal(before[n], p) for n, p in trained(trainer.model).items())


def test_moments_in_the_hosts_memory_change_no_bit(tmp_path: Path) -> None:
    save_model(small_model(1), tmp_path / "model")
    here, away = (Trainer(opened(tmp_path / "model"), LOOSE) for _ in range(2))
    away.optimiser.park()
    for _ in range(2):
        here.step(a_plan())
        away.step(a_plan())
    assert all(torch.equal(p, trained(away.model)[n]) for n, p in trained(here.model).items())


def test_a_long_row_of_the_real_shapes_is_predicted_without_a_gpu() -> None:
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=3072, tie_word_embeddings=True,
    )  # fmt: skip
    model = MemoryModel(config, dtype=torch.bfloat16, lora=None, kernels="cuda")
    load = BatchShape(prefix=0, rows=1, width=152000, trained=38000)
    peaks = [
        model.predict(load, t).peak
        for t in (
            PLAIN,
            MemoryOptions(checkpoint=True, save_attention=True),
            MemoryOptions(checkpoint=True, tile_mlp=65536),
            MemoryOptions(checkpoint=True, tile_mlp=65536, offload_activations=True),
        )
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    shared = model.predict(
        BatchShape(prefix=50000, rows=2, width=51000, trained=38000), MemoryOptions(checkpoint=True)
    )
    assert shared.peak < 1.3 * peaks[2], "a mask of width x length would be held"
    parked = model.predict(load, MemoryOptions(checkpoint=True, offload_activations=True)).host
    assert parked == 2 * 152000 * 1024 * 2


def test_a_few_layers_tell_the_memory_of_all(tmp_path: Path) -> None:
    deep = Qwen3Config(**{**SHAPES["deep"].to_dict(), "num_hidden_layers": 8, "layer_types": None})
    short, every = (MemoryModel(deep, dtype=torch.bfloat16, lora=None, kernels="cuda") for _ in range(2))
    assert short._alike
    every._alike = False
    load = BatchShape(prefix=0, rows=1, width=700, trained=200)
    for at, first in ((0, True), (1, False), (6, True)):
        tiled = dataclasses.replace(LADDER[at], tile_mlp=LADDER[at].tile_mlp and 256)
        assert short.predict(load, tiled, first=first) == every.predict(load, tiled, first=first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_is_predicted(tmp_path: Path, dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    plan, techniques = long_plan(800), MemoryOptions(checkpoint=True)
    found = measured(Trainer(opened(tmp_path / "moe", dtype=dtype), LOOSE), plan, techniques)
    predicted = MemoryModel(config, dtype=dtype, lora=None, kernels="cpu").predict(
        load_of(plan, plan.batches[0]), techniques
    )
    assert predicted.peak == pytest.approx(found, rel=0.05)


# --------------------------------------------------------------------------- trees


def tree_of(rows: list[np.ndarray[Any, Any]], trained: int) -> StepPlan:
    """One micro-batch of rows as a tree; the last `trained` tokens of each are."""
    plan, made = a_plan(100000), []
    for k, ids in enumerate(rows):
        mask = np.arange(len(ids)) >= len(ids) - trained
        made.append(
            dataclasses.replace(
                plan.rows[0], rollout_id=f"train/0/0/{k}", ids=ids.astype(np.int32), mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32), versions=np.zeros(len(ids), np.int32),
            )
        )  # fmt: skip
    tokens = build_tree(made).tokens
    batch = MicroBatch(prefix=0, rows=tuple(range(len(made))), tokens=tokens, layout="tree")
    return dataclasses.replace(plan, rows=tuple(made), batches=(batch,))


def star() -> StepPlan:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 2000, 400)
    return tree_of([np.concatenate([shared, rng.integers(0, 2000, 200)]) for _ in range(8)], 100)


def caterpillar() -> StepPlan:
    rng = np.random.default_rng(0)
    main = rng.integers(1000, 2000, 16 * 40)
    sides = [np.concatenate([main[: k * 40], rng.integers(0, 900, 20)]) for k in range(1, 16)]
    return tree_of([*sides, main], 10)


@pytest.mark.parametrize("shape", [star, caterpillar])
@pytest.mark.parametrize(
    "techniques",
    [
        MemoryOptions(checkpoint=True, save_attention=True),
        pytest.param(MemoryOptions(checkpoint=True), marks=pytest.mark.full),
        pytest.param(PLAIN, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_memory_of_a_tree_is_within_five_percent(
    tmp_path: Path, shape: Callable[[], StepPlan], techniques: MemoryOptions
) -> None:
    folder, plan = a_folder("wide", tmp_path / "model"), shape()
    found = measured(Trainer(opened(folder, dtype=torch.bfloat16), LOOSE), plan, techniques)
    model = MemoryModel(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, lora=None, kernels="cpu")
    predicted = model.predict(load_of(plan, plan.batches[0]), techniques)
    assert predicted.peak == pytest.approx(found, rel=0.05)


# --------------------------------------------------------------------------- a reference policy beside it

WITH_KL = LOOSE.changed(loss=LossConfig(kl="k3", kl_weight=0.1))


def test_the_weights_of_a_reference_are_not_room_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plan = a_folder("wide", tmp_path / "model"), long_plan(800)
    needed = MemoryModel(AutoConfig.from_pretrained(folder), dtype=torch.float32, lora=None, kernels="cpu")
    gib = needed.predict(load_of(plan, plan.batches[0]), MemoryOptions(checkpoint=True)).peak / GIB + 1e-3
    config = WITH_KL.changed(policy=PolicyConfig(kind="hf", memory_gib=gib))
    assert not Trainer(opened(folder), config.changed(loss=LOOSE.loss)).step(plan).skipped
    reference = Reference(opened(folder))
    with pytest.raises(TrainError, match="GiB are available"):
        Trainer(opened(folder), config, reference=reference).step(plan)
    held = sum(p.nbytes for _, p in reference.policies[0].named_parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 20 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    policy = opened(folder)
    on_gpu: Any = SimpleNamespace(
        device=torch.device("cuda"), model=policy.model, lora=None, compute_dtype=torch.float32, shards=1,
        head_dim=8,
        named_parameters=policy.named_parameters,
    )  # fmt: skip
    (scored_by,) = reference.policies
    assert isinstance(scored_by, HfPolicy)
    assert MemoryPlanner.of(on_gpu, 0.0, references=[scored_by]).limit == int(
        (12 * GIB - held) * (1 - KEPT_FREE)
    )


def test_the_forward_of_a_larger_reference_counts(tmp_path: Path) -> None:
    small, large = a_folder("wide", tmp_path / "small"), tmp_path / "large"
    config = AutoConfig.from_pretrained(small)
    config.intermediate_size = 8192
    Qwen3ForCausalLM(config).save_pretrained(large)
    reference, plan = Reference(opened(large)), long_plan(800)
    batch = make_batch(plan, plan.batches[0])
    found = peak_bytes(lambda: reference.logprobs(batch, 1.0), torch.device("cpu"))
    model = MemoryModel(config, dtype=torch.float32, lora=None, kernels="cpu", frozen=True)
    load = load_of(plan, plan.batches[0])
    assert model.scoring(load, PLAIN) == pytest.approx(found, rel=0.05)
    (scored_by,) = reference.policies
    assert isinstance(scored_by, HfPolicy)
    policy = opened(small)
    fit = MemoryPlanner(policy.model.config, policy, limit=1 << 40, host=0, reference=scored_by)
    alone = fit._model.predict(load, PLAIN)
    assert alone.peak < alone.states + model.scoring(load, PLAIN)
    fit.limit = alone.peak
    assert fit.choose(load) is None
    fit.limit = 2 * (alone.states + model.scoring(load, PLAIN))
    assert fit.choose(load) == PLAIN


def test_a_reference_of_the_compute_type_has_the_bits_of_one_in_fp32(tmp_path: Path) -> None:
    folder, plan = a_folder("llama", tmp_path / "model"), a_plan()
    batch = make_batch(plan, plan.batches[0])
    policy = opened(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        full = score(policy, *states(policy, batch), 1.0).logp
    before = {n: b.clone() for n, b in policy.model.named_buffers()}
    sums = checksum(policy)
    reference = Reference(policy)
    assert torch.equal(reference.logprobs(batch, 1.0), full)
    assert reference.checksum == sums
    assert {p.dtype for _, p in policy.named_parameters()} == {torch.bfloat16}
    assert all(
        torch.equal(b, before[n]) and b.dtype == before[n].dtype for n, b in policy.model.named_buffers()
    )


def test_adapters_leave_the_frequencies_of_positions_exact(tmp_path: Path) -> None:
    folder = a_folder("llama", tmp_path / "model")
    full, adapted = (opened(folder, dtype=torch.bfloat16, lora=lora) for lora in (None, LORA))
    buffers = dict(adapted.model.named_buffers())
    assert buffers
    assert all(torch.equal(b, buffers[n]) for n, b in full.model.named_buffers())
