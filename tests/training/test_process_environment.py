"""The bits of a learner follow its configuration, not the variables of the shell it was started from."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from train_lab import group, rollout, segment

from insitu.config import WARM_START
from insitu_train.learner.client import Learner
from insitu_train.learner.process import KEPT_MEMORY, LearnerSpec, computing
from insitu_train.options import OptimConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step

pytestmark = pytest.mark.slow

LEADING = {
    "MKL_NUM_THREADS": "1",
    "MKL_DOMAIN_NUM_THREADS": "MKL_DOMAIN_BLAS=1",
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "OMP_NUM_THREADS": "1",
}


def long_plan() -> StepPlan:
    """Rows long enough that the threads of attention's backward pass split one product into parts."""
    rng = np.random.default_rng(0)
    members = []
    for k in range(2):
        ids, mask = rng.integers(0, 400, 600).tolist(), [False] * 50 + [True] * 550
        members.append(rollout(f"g/0/{k}", float(k), [segment(f"g/0/{k}", 0, ids, mask, [-6.0] * 600)]))
    return plan_step([group("g/0", members)], PlanConfig(min_groups=1))


async def trained() -> str:
    """The weights of the shipped model after one step on two threads."""
    config = TrainConfig(optim=OptimConfig(lr=1e-3), max_logprob_gap=100.0, threads=2)
    async with Learner.start(LearnerSpec(model=WARM_START, samples=False, train=config)) as learner:
        await learner.step(long_plan())
        return learner.weights


BACKWARD = """
import hashlib, torch
torch.set_num_threads(2)
torch.manual_seed(0)
q = [torch.randn(1, 4, 240, 32).requires_grad_() for _ in range(3)]
torch.nn.functional.scaled_dot_product_attention(*q, is_causal=True).square().sum().backward()
print(hashlib.sha256(b"".join(x.grad.numpy().tobytes() for x in q)).hexdigest())
"""
"""Its parallel kernel calls MKL from OpenMP's threads, which torch.set_num_threads does not reach."""


@pytest.mark.full
def test_threads_within_a_kernel_are_as_many_as_torch_was_told() -> None:
    def bits(**variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "OMP_"))}
        env = computing(kept | variables)
        return subprocess.check_output([sys.executable, "-c", BACKWARD], env=env, text=True)

    assert bits(MKL_NUM_THREADS="1") == bits()


@pytest.mark.full
@pytest.mark.asyncio
async def test_a_shell_does_not_lead_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEADING:
        monkeypatch.delenv(name, raising=False)
    alone = await trained()
    for name, value in LEADING.items():
        monkeypatch.setenv(name, value)
    assert await trained() == alone


TAKEN_AGAIN = """
import resource
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (8 << 20) for _ in range(32)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Page faults of the third time that 256 MiB are taken and freed; there are 65,536 pages."""


def test_freed_memory_is_taken_again_without_page_faults() -> None:
    env = computing({name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")})
    assert int(subprocess.check_output([sys.executable, "-c", TAKEN_AGAIN], env=env, text=True)) < 6_000


def test_what_leads_torch_is_dropped_and_the_rest_stays() -> None:
    kept = {"PATH": "/bin", "OMP_PROC_BIND": "true", "MKL_THREADING_LAYER": "GNU"}
    added = KEPT_MEMORY | {"OMP_WAIT_POLICY": "PASSIVE"}
    assert computing(kept | LEADING, shares_tensors=True) == kept | added
    assert computing({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
