"""Supervised training: exact loss, shared prefix, micro-batches, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from insitu.errors import TrainError
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise
from insitu_train.options import OptimConfig, rate
from insitu_train.sft.trainer import Sft, SftConfig, SftTensors

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=48, max_position_embeddings=128,
)  # fmt: skip
torch.set_num_threads(1)


def batch(seed: int = 0, prefix: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = rng.random((6, 9)) < 0.5
    mask[:, 0] = prefix > 0
    return (
        rng.integers(0, 50, prefix).astype(np.int32),
        rng.integers(0, 50, (6, 9)).astype(np.int32),
        mask,
    )


def slow(model: Qwen3, prefix: np.ndarray, rows: np.ndarray, mask: np.ndarray) -> tuple[float, float]:
    """One row at a time, whole logits, targets picked by hand."""
    losses, hits = [], []
    for row, chosen in zip(rows, mask, strict=True):
        ids = torch.from_numpy(np.concatenate([prefix, row]).astype(np.int64))
        logits = model.logits(model.hidden(ids[:0], ids[None]))[0]
        for t in np.flatnonzero(chosen):
            at = len(prefix) + int(t)
            losses.append(F.cross_entropy(logits[at - 1], ids[at]).item())
            hits.append(logits[at - 1].argmax().item() == ids[at].item())
    return float(np.mean(losses)), float(np.mean(hits))


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_loss_and_accuracy_equal_a_slow_reference(prefix: int) -> None:
    model = initialise(CONFIG, 0)
    data = batch(prefix=prefix)
    loss, accuracy = Sft(model, SftConfig(micro_rows=4)).evaluate(*data)
    expected = slow(model, *data)
    assert abs(loss - expected[0]) < 1e-5
    assert accuracy == expected[1]


def test_updates_do_not_depend_on_micro_batches_or_row_order() -> None:
    prefix, rows, mask = batch()
    order = np.array([3, 1, 5, 0, 2, 4])
    weights = []
    for micro, index in ((64, np.arange(6)), (1, np.arange(6)), (4, order)):
        model = initialise(CONFIG, 0)
        sft = Sft(model, SftConfig(micro_rows=micro, optim=OptimConfig(lr=1e-12, muon_lr=0.0)))
        sft.optimiser.zero()
        sft._pass(SftTensors(prefix=prefix, rows=rows[index], mask=mask[index]), True)
        weights.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert len(weights[0]) == len(dict(initialise(CONFIG, 0).named_parameters()))
    for other in weights[1:]:
        for name, grad in weights[0].items():
            assert (grad - other[name]).abs().max() < 1e-6, name


def test_row_weights_scale_rows() -> None:
    prefix, rows, mask = batch()
    model = initialise(CONFIG, 0)
    one = Sft(model, SftConfig(optim=OptimConfig(lr=1e-12, muon_lr=0.0)))
    only = np.array([0, 0, 1, 0, 0, 0], np.float32)
    assert one.step(prefix, rows, mask, only)[0] == pytest.approx(
        slow(model, prefix, rows[2:3], mask[2:3])[0], abs=1e-5
    )


def test_it_learns_a_batch_by_heart() -> None:
    prefix, rows, mask = batch()
    mask[:, 0] = False  # which row it is cannot be guessed
    optim = OptimConfig(lr=3e-3, muon_lr=0.02, warmup_steps=5, decay="linear", total_steps=100)
    sft = Sft(initialise(CONFIG, 0), SftConfig(optim=optim))
    first = sft.step(prefix, rows, mask)
    loss, accuracy = sft.run(SftTensors(prefix=prefix, rows=rows, mask=mask) for _ in range(95))
    assert first[0] > 3.5
    assert loss < 0.3
    assert accuracy > 0.95


def test_refusals_leave_weights_alone() -> None:
    prefix, rows, mask = batch()
    model = initialise(CONFIG, 0)
    sft = Sft(model, SftConfig())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(TrainError, match="no target"):
        sft.step(prefix, rows, np.zeros_like(mask))
    with pytest.raises(TrainError, match="without a predictor"):
        sft.step(prefix[:0], rows, mask)
    with pytest.raises(TrainError, match="gradient norm"):
        sft.step(prefix, rows, mask, np.full(6, np.inf, np.float32))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_schedule() -> None:
    config = OptimConfig(warmup_steps=4, decay="linear", total_steps=14, final=0.1)
    assert [rate(config, k) for k in (0, 3, 4, 9)] == pytest.approx([0.25, 1.0, 1.0, 0.55])
    assert rate(config, 14) == rate(config, 99) == pytest.approx(0.1)
