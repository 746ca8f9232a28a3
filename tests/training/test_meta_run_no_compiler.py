"""A learner of the built-in model never loads torch's compiler, which costs it a second and some 80 MB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from insitu_train.embedded.architecture import ModelConfig
from insitu_train.memory.meta_run import AttentionShape, BatchShape
from insitu_train.memory.predict import BuiltinMemory, at_most
from insitu_train.model.base import PLAIN
from insitu_train.trainer.optimizer import AdamW

pytestmark = pytest.mark.slow

STEP = """
import sys
from train_lab import sampled_groups, small_model
import insitu_train.learner.main
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.trainer.trainer import Trainer

model = small_model()
trainer = Trainer(model, TrainConfig())
assert trainer.fit is not None and not trainer.step(plan_step(sampled_groups(model), PlanConfig())).skipped
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_step_loads_no_compiler() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", STEP]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})


def parameters() -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((7, 5), (5,), (3, 3))]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_update_has_the_bits_of_torchs_class(weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    own = AdamW(ours, lr=3e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    torchs = torch.optim.AdamW(theirs, lr=3e-2, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
    rng = torch.Generator().manual_seed(1)
    for step in range(5):
        for groups in (own.param_groups, torchs.param_groups):
            groups[0]["lr"] = 1e-2 * (step + 1)
        for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            # the last one has no gradient at first: its moments begin later than the others'
            p.grad = torch.randn(p.shape, generator=rng) if index < 2 or step > 1 else None
            q.grad = None if p.grad is None else p.grad.clone()
        own.step()
        torchs.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            assert own.state[p].keys() == torchs.state[q].keys()
            assert all(torch.equal(own.state[p][key], torchs.state[q][key]) for key in own.state[p])


MODELS = {
    "tiny": ModelConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48,
    ),
    "many heads": ModelConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64, intermediate_size=16,
    ),
    "large": ModelConfig(
        vocab_size=150_000, hidden_size=1024, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=3072, tie_word_embeddings=False,
    ),
}  # fmt: skip
LOADS = [
    BatchShape(prefix=0, rows=1, width=2, trained=1),
    BatchShape(prefix=300, rows=16, width=200, trained=3000),
    BatchShape(prefix=0, rows=1, width=20_000, trained=20_000),
    BatchShape(
        prefix=0, rows=1, width=6000, trained=5000,
        tree=AttentionShape(causal=200, queries=1000, keys=4000, whole=5500),
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_what_is_said_without_a_dry_run_is_more_than_what_one_finds(config: ModelConfig) -> None:
    model = BuiltinMemory(config)
    weights = sum(p.nbytes for p in model._model.parameters())
    for load in LOADS:
        assert 1.5 * model.predict(load, PLAIN, first=False).peak < at_most(config, weights, load)
