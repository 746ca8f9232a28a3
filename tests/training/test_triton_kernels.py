"""The head's Triton kernels: run by Triton's interpreter on the CPU, against the torch version, and compiled
for a GPU that need not be there, with wide loads and stores.

Runs in this Python where Triton is installed, else in that of the real vLLM server, which brings Triton.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from sources import SOURCES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
torch.set_num_threads(1)
from insitu_train.loss import chunked_logits as tiles, fused_head, triton_kernels as kernels

torch.manual_seed(0)
tiles.CPU_TILE, kernels.BLOCK = (5, 48), 32
hidden, weight = torch.randn(7, 16) * 3, torch.randn(100, 16)
weight[80:] *= 12
hidden[:4] *= 0.02
targets, factor = torch.randint(0, 100, (7,)), torch.randn(7)
over = (hidden @ weight.T / 0.7)[:, 48:].amax(1) - (hidden @ weight.T / 0.7)[:, :48].amax(1)
assert (over > 2 * tiles.SLACK).any(), over

def run(kernels):
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = lambda logp, part: factor[part] * logp.square()
    out = fused_head.objective(h, w, targets, 0.7, loss, kernels=kernels)
    fused = torch.autograd.grad(out.total, [h, w])
    scores = fused_head.scores(h, w, targets, 0.7, kernels)
    split = torch.autograd.grad((factor * scores.logp.square()).sum(), [h, w])
    assert torch.equal(scores.best, out.scores.best)
    return [out.scores.logp, out.scores.entropy, *fused, scores.logp.detach(), scores.entropy, *split]

for found, expected in zip(run("triton"), run("torch"), strict=True):
    assert float(expected.abs().max()) > 0.01
    far = (found - expected).abs().max() / expected.abs().max()
    assert far < 1e-4, far

# the dtype of a GPU's exponentials
stores = []
for kind in (kernels.TritonBackend(), tiles.TorchBackend()):
    e, mark = torch.full((7, 100), 9.0, dtype=torch.bfloat16), torch.zeros(7)
    stats = tiles.Stats.fresh(mark)
    kind.absorb((hidden @ weight.T)[:, :48].contiguous(), e[:, :48], 0, targets, stats, mark, 1.0)
    assert torch.equal(mark, stats.ref)
    stores.append(e)
assert torch.allclose(stores[0].float(), stores[1].float(), rtol=2**-7, atol=0)
assert bool((stores[0][:, 48:] == 9.0).all())
print("agreed")
"""

COMPILES = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from insitu_train.loss import triton_kernels as kernels

def build(kernel, given, kinds):
    names = kernel.arg_names
    kind = lambda n: kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32")
    signature = {n: "constexpr" if n in given else kind(n) for n in names}
    aligned = {"x_ptr", "x_stride", "e_ptr", "e_stride", "start"} & set(names)
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    target = GPUTarget("cuda", 90, 32)
    return compile(ASTSource(kernel, signature, given, attributes), target=target).asm["ptx"]

kinds = {"e_ptr": "*bf16", "target_ptr": "*i64", "by": "fp32"}
given = {"width": 4608, "slack": 40.0, "STORE": True, "BLOCK": kernels.BLOCK}
ptx = build(kernels._absorb, given, kinds)
assert "ld.global.v4" in ptx and "st.global.v4" in ptx and ".local" not in ptx, ptx
build(kernels._absorb, {**given, "STORE": False}, kinds | {"e_ptr": "*fp32"})
build(kernels._settle, {"columns": 4608, "BLOCK": kernels.BLOCK}, kinds)
print("agreed")
"""


def python_with_triton() -> Path:
    if importlib.util.find_spec("triton") is not None:
        return Path(sys.executable)
    from tests.fakes.vllm_server import installed_vllm

    return installed_vllm(ROOT / "scripts" / "setup-vllm") / "bin" / "python"


@pytest.mark.full
@pytest.mark.parametrize(("program", "interpret"), [(PROGRAM, "1"), (COMPILES, "0")])
def test_kernels_agree_with_torch_and_compile_for_hopper(
    program: str, interpret: str, tmp_path: Path
) -> None:
    (tmp_path / "orjson").symlink_to(Path(orjson.__file__).parent)  # that environment has none
    environment = {
        **os.environ,
        "TRITON_INTERPRET": interpret,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCES}:{tmp_path}",
    }
    done = subprocess.run(
        [python_with_triton(), "-c", program],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "agreed\n"
