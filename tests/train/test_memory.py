"""Predicted memory against every allocation of a real step, on shapes that nothing was fitted to; the choice
of techniques; refusal with numbers instead of running out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_policy_hf import LOOSE, a_plan, opened, trained
from train_lab import small_model
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from whet.bench._memory import peak_bytes
from whet.engine.embedded_model import save_model
from whet.errors import TrainError
from whet.train.memory.dry import Load
from whet.train.memory.fit import load_of
from whet.train.memory.predict import GIB, MemoryModel
from whet.train.memory.techniques import PLAIN, Techniques
from whet.train.options import Lora, PolicyConfig
from whet.train.plan.step import StepPlan
from whet.train.policy.hf import HfPolicy
from whet.train.trainer.trainer import Trainer

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


def measured(trainer: Trainer, plan: StepPlan, techniques: Techniques) -> int:
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
        ("wide", 3, None, torch.float32, Techniques(checkpoint=True)),
        ("deep", 1, LORA, torch.float32, Techniques(checkpoint=True, tile_mlp=256)),
        ("llama", 1, None, torch.bfloat16, Techniques(checkpoint=True, save_attention=True)),
        pytest.param("wide", 1, None, torch.float32, PLAIN, marks=pytest.mark.full),
        pytest.param("deep", 4, None, torch.float32, PLAIN, marks=pytest.mark.full),
        pytest.param("llama", 2, None, torch.bfloat16, PLAIN, marks=pytest.mark.full),
    ],
)
def test_predicted_memory_is_within_five_percent(
    tmp_path: Path, shape: str, rows: int, lora: Lora | None, dtype: torch.dtype, techniques: Techniques
) -> None:
    folder = a_folder(shape, tmp_path / "model")
    plan = long_plan(800, rows)
    found = measured(Trainer(opened(folder, lora=lora, dtype=dtype), LOOSE), plan, techniques)
    model = MemoryModel(AutoConfig.from_pretrained(folder), dtype=dtype, lora=lora, kernels="cpu")
    predicted = model.predict(load_of(plan, plan.batches[0]), techniques)
    assert predicted.peak == pytest.approx(found, rel=0.05)
    # the pass itself, without the share that any formula has right
    assert predicted.peak - predicted.states == pytest.approx(found - predicted.states, rel=0.06)


def limited(folder: Path, gib: float) -> Trainer:
    config = dataclasses.replace(LOOSE, policy=PolicyConfig(kind="hf", memory_gib=gib))
    return Trainer(opened(folder), config)


def test_the_least_costly_techniques_that_fit_are_chosen(tmp_path: Path) -> None:
    folder, plan = a_folder("wide", tmp_path / "model"), long_plan(800)
    load = load_of(plan, plan.batches[0])
    roomy = limited(folder, 1.0)
    assert roomy.fit is not None
    assert roomy.fit.plan(plan) == [PLAIN]
    model = MemoryModel(AutoConfig.from_pretrained(folder), dtype=torch.float32, lora=None, kernels="cpu")
    plain = model.predict(load, PLAIN).peak / GIB
    checkpoint = model.predict(load, Techniques(checkpoint=True)).peak / GIB
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
    numbers = re.search(r"needs ([\d.]+) GiB on cpu with every technique on, ([\d.]+) GiB are there", said)
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
    load = Load(prefix=0, rows=1, width=152000, trained=38000)
    peaks = [
        model.predict(load, t).peak
        for t in (
            PLAIN,
            Techniques(checkpoint=True, save_attention=True),
            Techniques(checkpoint=True, tile_mlp=65536),
            Techniques(checkpoint=True, tile_mlp=65536, offload_activations=True),
        )
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    shared = model.predict(
        Load(prefix=50000, rows=2, width=51000, trained=38000), Techniques(checkpoint=True)
    )
    assert shared.peak < 1.3 * peaks[2], "a mask of width x length would be held"
    parked = model.predict(load, Techniques(checkpoint=True, offload_activations=True)).host
    assert parked == 2 * 152000 * 1024 * 2
