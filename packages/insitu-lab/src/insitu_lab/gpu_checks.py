"""The checks of numbers of `insitu gpu-check` (suites/gpu): each prints one JSON object.

Run as `python -m insitu_lab.gpu_checks SLICE.CHECK [--rehearse]`. On a GPU with the shapes of real
models, with --rehearse on the CPU with small ones. `Skip` names why a check cannot run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insitu.errors import InsituError, TrainError
from insitu.types import Ledger
from insitu_train.attention.rows import Causal, Shared, flash_works
from insitu_train.attention.tree import TreeAttend, visible
from insitu_train.loss.chunked_logits import Kernels, triton_works
from insitu_train.loss.fused_head import objective, scores
from insitu_train.memory.peak import peak_bytes
from insitu_train.memory.plan import LADDER, load_of
from insitu_train.memory.predict import GIB, MemoryModel
from insitu_train.model.base import Attend, MemoryOptions
from insitu_train.model.hf import HfPolicy, adopt
from insitu_train.options import Lora, OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.prefix_tree import build_tree
from insitu_train.plan.step import PlanConfig, PlanRow, StepPlan, pack_rows, plan_digest
from insitu_train.trainer import checkpoint
from insitu_train.trainer.trainer import Trainer

LOSS_LIMIT, COSINE = 3e-2, 0.999
"""Largest relative difference of a loss, and smallest cosine of gradients, of bfloat16 against float32."""
MEMORY_LIMIT = 0.05
QWEN_06B: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
TOY: Mapping[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip


class Skip(Exception):
    """The check cannot run here; the message says why."""


class Bench:
    """Device and sizes of the checks, and their results."""

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}

    def need_gpu(self) -> None:
        """Raise Skip on a rehearsal or where torch sees no GPU."""
        if self.rehearse or not torch.cuda.is_available():
            raise Skip("a rehearsal has no GPU" if self.rehearse else "torch sees no GPU")

    def below(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Add a check that passes when `value` is at most `limit`."""
        ok = bool(value <= limit)
        why = "" if ok else f"{name}: {value:.3g} is over {limit:g}"
        self.add(name, ok=ok, value=value, limit=limit, unit=unit, why=why)

    def add(self, name: str, *, ok: bool, **more: Any) -> None:
        given = {"value": None, "limit": None, "unit": "", "why": "", **more}
        if isinstance(given["value"], float) and not math.isfinite(given["value"]):
            given["value"] = str(given["value"])
        self.checks.append({"name": name, "ok": ok, **given})

    def policy(self, *, dtype: torch.dtype | None = None, lora: bool = False, layers: int = 0) -> HfPolicy:
        """Return a random model of the slice's shape. layers: 0 = the shape's."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        build: Any = AutoModelForCausalLM.from_config
        with self.device:
            model = build(self.config(layers), dtype=torch.float32, attn_implementation="eager")
        adapters = Lora(rank=8, alpha=16.0) if lora else None
        return adopt(model, device=self.device, dtype=dtype or self.dtype, lora=adapters)

    def config(self, layers: int = 0) -> Any:
        from transformers import Qwen3Config

        shape = dict(TOY if self.rehearse else QWEN_06B)
        shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
        return Qwen3Config(**shape, max_position_embeddings=1 << 20, use_cache=False)

    def trainer(self, policy: HfPolicy, **more: Any) -> Trainer:
        optim = OptimConfig(lr=1e-4, warmup_steps=0)
        settings = {"optim": optim, "max_logprob_gap": 1e3, "max_staleness": 1 << 20, "threads": 2, **more}
        return Trainer(policy, TrainConfig(policy=PolicyConfig(kind="hf"), **settings))

    def plan(self, lengths: Sequence[int], *, shared: int = 0, layout: str = "prefix") -> StepPlan:
        """Return a plan of random rows behind `shared` common tokens, the second half trained."""
        rng, vocab = np.random.default_rng(0), int(self.config().vocab_size)
        head = rng.integers(0, vocab, shared)
        rows = []
        for number, length in enumerate(lengths):
            ids = np.concatenate([head, rng.integers(0, vocab, length)]).astype(np.int32)
            mask = np.arange(len(ids)) >= shared + length // 2
            rows.append(_row(number, ids, mask, vocab))
        config = PlanConfig(token_budget=1 << 20, layout=layout)  # type: ignore[arg-type]
        trained = sum(int(row.mask.sum()) for row in rows)
        account = Ledger(captured=trained, trained=trained, excluded={})
        return StepPlan(rows=tuple(rows), batches=pack_rows(rows, config), ledger=account, groups=1)


def _row(number: int, ids: Any, mask: Any, vocab: int) -> PlanRow:
    return PlanRow(
        group_id="check/0",
        rollout_id=f"check/0/{number}",
        segment=0,
        advantage=1.0 if number % 2 else -0.5,
        weight=1.0 / int(mask.sum()),
        ids=ids,
        mask=mask,
        logprobs=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
        versions=np.zeros(len(ids), np.int32),
    )


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the cosine of two lists of tensors as one vector each."""
    pairs = [(x.double().flatten().cpu(), y.double().flatten().cpu()) for x, y in zip(a, b, strict=True)]
    dot = sum(float(x @ y) for x, y in pairs)
    norms = math.sqrt(sum(float(x @ x) for x, _ in pairs)) * math.sqrt(sum(float(y @ y) for _, y in pairs))
    return dot / norms if norms else 0.0


# --------------------------------------------------------------------------- env


def env_versions(bench: Bench) -> None:
    """Report versions."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "vllm", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["tf32_variables"] = {k: v for k, v in os.environ.items() if "TF32" in k}
    bench.figures |= found
    bench.add("env.transformers", ok=found["transformers"] is not None, why="transformers is missing")


def env_compiler(bench: Bench) -> None:
    """Look for a C compiler and Python's headers, which Triton needs."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    bench.figures |= {"compiler": compiler, "python_h": header.exists()}
    if bench.rehearse:
        raise Skip("a rehearsal does not use Triton")
    bench.add("env.compiler", ok=bool(compiler), why="no C compiler: the head uses torch")
    bench.add("env.header", ok=header.exists(), why=f"{header} is missing: the head uses torch")


def env_gpu(bench: Bench) -> None:
    """Report the GPU; check that float32 products are exact."""
    bench.need_gpu()
    free, total = torch.cuda.mem_get_info()
    bench.figures |= {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "free_gib": free / GIB,
        "total_gib": total / GIB,
        "cuda": torch.version.cuda,
        "capability": list(torch.cuda.get_device_capability()),
    }
    exact = not torch.backends.cuda.matmul.allow_tf32
    bench.add("env.float32", ok=exact, why="TF32 is on: float32 products are rounded")
    a = torch.randn(512, 512, device="cuda")
    off = float((a @ a - (a.double() @ a.double())).abs().max() / 512**0.5)
    bench.below("env.float32_product", off, 1e-4)


def env_attention(bench: Bench) -> None:
    """List the attention kernels that run, by the profiler's names."""
    bench.need_gpu()
    from torch.profiler import ProfilerActivity, profile

    for width in (64, 128, 256):
        q, k = (torch.randn(n, 512, width, device="cuda", dtype=torch.bfloat16) for n in (16, 8))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            Causal()(q, k, k, width**-0.5)
            torch.cuda.synchronize()
        names = sorted({event.key for event in seen.key_averages()})
        flash = any("flash" in name.lower() for name in names)
        bench.figures[f"attention_{width}"] = names[:4]
        bench.add(f"env.flash_{width}", ok=flash, why=f"no flash kernel among {names[:3]}")


# --------------------------------------------------------------------------- kernels


def _head_inputs(bench: Bench) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    sizes = [(256, 64)] if bench.rehearse else [(151_936, 1024), (151_936, 2560)]
    for vocab, width in sizes:
        for positions in (1, 127) if bench.rehearse else (1, 127, 3000):
            generator = torch.Generator().manual_seed(positions)
            hidden = torch.randn(positions, width, generator=generator) * 0.5
            weight = torch.randn(vocab, width, generator=generator) * 0.05
            targets = torch.randint(vocab, (positions,), generator=generator)
            moved = (hidden.to(bench.device, bench.dtype), weight.to(bench.device), targets.to(bench.device))
            yield width, positions, *moved


def _head(bench: Bench, kernels: Kernels) -> None:
    for width, positions, hidden, weight, targets in _head_inputs(bench):
        name = f"kernels.{kernels}_{width}_{positions}"
        leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = objective(leaf, matrix, targets, 1.0, lambda logp, part: -logp, kernels=kernels)
        found.total.backward()  # type: ignore[no-untyped-call]
        exact_h = hidden.double().requires_grad_()
        exact_w = weight.to(bench.dtype).double().requires_grad_()
        logp = torch.log_softmax(exact_h @ exact_w.T, -1).gather(1, targets[:, None])[:, 0]
        (-logp.sum()).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            again = scores(hidden, weight, targets, 1.0, kernels).logp
        bench.below(f"{name}_logp", float((again.double() - logp).abs().max()), 5e-3, "nats")
        if leaf.grad is None or matrix.grad is None or exact_h.grad is None or exact_w.grad is None:
            raise TrainError("the head gave no gradient")
        bench.below(f"{name}_hidden", 1.0 - cosine([leaf.grad], [exact_h.grad]), 1.0 - COSINE)
        bench.below(f"{name}_weight", 1.0 - cosine([matrix.grad], [exact_w.grad]), 1.0 - COSINE)


def kernels_head(bench: Bench) -> None:
    """Compare the head by torch's products with float64."""
    _head(bench, "torch")


def kernels_triton(bench: Bench) -> None:
    """Compare the head by Triton's kernels with float64."""
    bench.need_gpu()
    if not triton_works("cuda"):
        raise Skip("Triton does not run here: the head uses torch")
    _head(bench, "triton")


def _attends(bench: Bench, name: str, attend: Attend, mask: Tensor, tokens: int) -> None:
    """Compare an attention, forward and backward, with an explicit mask in float32."""
    for width in (16,) if bench.rehearse else (64, 128, 256):
        if not bench.rehearse and not flash_works(bench.dtype, width):
            raise Skip(f"no flash kernel for head_dim {width}")
        for groups in (1, 2) if bench.rehearse else (1, 2, 8):
            generator = torch.Generator().manual_seed(width)
            shapes = [(8, tokens, width), (8 // groups, tokens, width), (8 // groups, tokens, width)]
            made = [torch.randn(*s, generator=generator).to(bench.device, bench.dtype) for s in shapes]
            ours, theirs = ([t.clone().requires_grad_() for t in made] for _ in range(2))
            out = attend(ours[0], ours[1], ours[2], width**-0.5)
            q, k, v = (t.float() for t in theirs)
            k, v = (t.repeat_interleave(groups, 0) for t in (k, v))
            scored = (q @ k.transpose(1, 2)) * width**-0.5
            wanted = scored.masked_fill(~mask.to(bench.device), -math.inf).softmax(-1) @ v
            upstream = torch.randn(*wanted.shape, generator=generator).to(bench.device)
            (out.float() * upstream).sum().backward()  # type: ignore[no-untyped-call]
            (wanted * upstream).sum().backward()
            where = f"kernels.{name}_{width}_{groups}"
            bench.below(f"{where}_out", float((out - wanted).abs().max()), 3e-2)
            grads = [[t.grad for t in side if t.grad is not None] for side in (ours, theirs)]
            bench.below(f"{where}_gradient", 1.0 - cosine(*grads), 1.0 - COSINE)


def kernels_rows(bench: Bench) -> None:
    """Compare rows behind a shared prefix with an explicit mask."""
    prefix, rows, width = (7, 3, 11) if bench.rehearse else (700, 3, 333)
    tokens = prefix + rows * width
    row = torch.cat([torch.full((prefix,), -1), torch.arange(rows).repeat_interleave(width)])
    at = torch.arange(tokens)
    mask = (at[:, None] >= at) & ((row[None] == -1) | (row[:, None] == row))
    _attends(bench, "rows", Shared(prefix, rows), mask, tokens)


def kernels_tree(bench: Bench) -> None:
    """Compare a tree of rows, piece by piece, with an explicit mask."""
    shared = 10 if bench.rehearse else 600
    plan = bench.plan([shared] * 4, shared=shared)
    tree = build_tree(plan.rows)
    _attends(bench, "tree", TreeAttend.of(tree), visible(tree), tree.tokens)


# --------------------------------------------------------------------------- step


def _gradients(trainer: Trainer, plan: StepPlan) -> tuple[float, list[Tensor]]:
    loss = trainer.gradients(plan)
    found = [p.grad.detach().float().cpu() for p in trainer.optimiser.named.values() if p.grad is not None]
    trainer.optimiser.zero()
    return loss, found


def _compared(bench: Bench, *, name: str, lora: bool = False, layout: str = "prefix") -> None:
    """Compare loss and gradients with those of float32 and rows behind a prefix."""
    sizes, shared = ([20, 30, 25], 12) if bench.rehearse else ([600, 900, 750], 512)
    plan = bench.plan(sizes, shared=shared, layout=layout)
    plain = bench.plan(sizes, shared=shared)
    exact = _gradients(bench.trainer(bench.policy(dtype=torch.float32, lora=lora)), plain)
    trainer = bench.trainer(bench.policy(lora=lora))
    loss, grads = _gradients(trainer, plan)
    off = abs(loss - exact[0]) / max(1e-3, abs(exact[0]))
    bench.below(f"step.{name}_loss", off, LOSS_LIMIT)
    bench.below(f"step.{name}_gradient", 1.0 - cosine(grads, exact[1]), 1.0 - COSINE)
    result = trainer.step(plan)
    bench.add(f"step.{name}_update", ok=result.version == 1, value=result.grad_norm, why=result.skipped)


def step_techniques(bench: Bench) -> None:
    """Compare the gradients of each memory technique."""
    plan = bench.plan([40, 30] if bench.rehearse else [1500, 1200])
    policy = bench.policy(layers=0 if bench.rehearse else 6)
    trainer = bench.trainer(policy)
    trainer.fit = None  # techniques are set by hand
    wanted: list[Tensor] = []
    for techniques in LADDER:
        policy.techniques = techniques
        trainer.optimiser.park(techniques.offload_optimizer)
        _, found = _gradients(trainer, plan)
        wanted = wanted or found
        name = str(techniques).replace(" + ", "_")
        bench.below(f"step.{name}", 1.0 - cosine(found, wanted), 1.0 - COSINE)
    policy.techniques = MemoryOptions()


def step_checkpoint(bench: Bench) -> None:
    """Compare a step after a checkpoint is loaded with the same step without."""
    plan = bench.plan([40, 30] if bench.rehearse else [1500, 1200])
    layers = 0 if bench.rehearse else 4
    trainer = bench.trainer(bench.policy(layers=layers))
    trainer.step(plan)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(trainer, Path(folder) / "c")
        second = trainer.step(plan)
        again = bench.trainer(bench.policy(layers=layers))
        checkpoint.load(again, Path(folder) / "c")
    repeated = again.step(plan)
    limit = 0.0 if bench.rehearse else 1e-2
    bench.below("step.resumed_loss", abs(second.loss - repeated.loss), limit)


# --------------------------------------------------------------------------- memory


def memory_predicted(bench: Bench) -> None:
    """Compare the predicted peak of a step with the measured one."""
    lengths = [512, 1024] if bench.rehearse else [4_000, 16_000, 65_000]
    trainer = bench.trainer(bench.policy())
    policy = trainer.model
    if trainer.fit is None or not isinstance(policy, HfPolicy):
        raise TrainError("the trainer chooses no memory techniques")
    trainer.step(bench.plan([64]))  # the optimizer's moments exist from now on
    kernels: Any = "cpu" if bench.rehearse else "cuda"
    model = MemoryModel(bench.config(), dtype=bench.dtype, lora=None, kernels=kernels)
    for length in lengths:
        plan = bench.plan([length])
        chosen = next(t for t in trainer.fit.plan(plan) if isinstance(t, MemoryOptions))
        predicted = model.predict(load_of(plan, plan.batches[0]), chosen).peak
        held = sum(p.nbytes for _, p in policy.named_parameters())
        held += sum(
            t.nbytes for t in trainer.optimiser.tensors().values() if t.device.type == bench.device.type
        )
        peak = held + peak_bytes(lambda plan=plan: trainer.step(plan), bench.device)  # type: ignore[misc]
        bench.figures[f"memory_{length}"] = {"peak_gib": peak / GIB, "techniques": str(chosen)}
        bench.below(f"memory.predicted_{length}", abs(predicted / peak - 1.0), MEMORY_LIMIT)


def memory_refused(bench: Bench) -> None:
    """Expect a row that does not fit to be refused with numbers."""
    gib = 0.004 if bench.rehearse else 12.0
    trainer = Trainer(
        bench.policy(), TrainConfig(policy=PolicyConfig(kind="hf", memory_gib=gib), max_logprob_gap=1e3)
    )
    try:
        trainer.step(bench.plan([2048] if bench.rehearse else [400_000]))
    except TrainError as error:
        bench.add("memory.refused", ok="GiB" in str(error), value=str(error), why=str(error))
    else:
        bench.add("memory.refused", ok=False, why="a step over the limit was trained")


# --------------------------------------------------------------------------- ranks


def _ranks(bench: Bench, *, shard: bool) -> None:
    """Compare two ranks with one process."""
    import asyncio
    from dataclasses import replace

    from insitu_train.learner.client import Learner
    from insitu_train.learner.process import LearnerSpec

    if not bench.rehearse:
        bench.need_gpu()
        if torch.cuda.device_count() < 2:
            raise Skip(f"it needs two GPUs, torch sees {torch.cuda.device_count()}")
    plan = bench.plan([40, 30, 35, 20] if bench.rehearse else [800, 700, 900, 600])
    one_each = [
        MicroBatch(prefix=0, rows=(n,), tokens=len(r.ids), rank=n % 2) for n, r in enumerate(plan.rows)
    ]
    plan = replace(plan, batches=tuple(one_each), digest="")
    plan = replace(plan, digest=plan_digest(plan))

    async def run(folder: Path, ranks: int) -> tuple[float, float]:
        train = TrainConfig(
            optim=OptimConfig(lr=1e-4, warmup_steps=0),
            policy=PolicyConfig(kind="hf", device=bench.device.type),  # type: ignore[arg-type]
            max_logprob_gap=1e3,
            max_staleness=9,
            threads=1,
            ranks=ranks,
            shard=shard and ranks > 1,
            step_timeout_s=120.0,
        )
        async with Learner.start(LearnerSpec(model=folder, train=train, samples=False)) as learner:
            await learner.step(plan)
            result = await learner.step(plan)
            return result.loss, result.grad_norm or 0.0

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        bench.policy(dtype=torch.float32, layers=0 if bench.rehearse else 4).stored().write(folder)
        alone = asyncio.run(run(folder, 1))
        both = asyncio.run(run(folder, 2))
    limit = 1e-4 if bench.rehearse else LOSS_LIMIT
    kind = "sharded" if shard else "replicated"
    for what, a, b in zip(("loss", "norm"), alone, both, strict=True):
        bench.below(f"ranks.{kind}_{what}", abs(a - b) / max(1e-3, abs(a)), limit)


CHECKS: Mapping[str, Callable[[Bench], None]] = {
    "env.versions": env_versions,
    "env.compiler": env_compiler,
    "env.gpu": env_gpu,
    "env.attention": env_attention,
    "kernels.head": kernels_head,
    "kernels.triton": kernels_triton,
    "kernels.rows": kernels_rows,
    "kernels.tree": kernels_tree,
    "step.full": partial(_compared, name="full"),
    "step.lora": partial(_compared, name="lora", lora=True),
    "step.tree": partial(_compared, name="tree", layout="tree"),
    "step.techniques": step_techniques,
    "step.checkpoint": step_checkpoint,
    "memory.predicted": memory_predicted,
    "memory.refused": memory_refused,
    "ranks.replicated": partial(_ranks, shard=False),
    "ranks.sharded": partial(_ranks, shard=True),
}


def main(argv: list[str]) -> int:
    """Print the result of one check."""
    parser = argparse.ArgumentParser(prog="insitu_lab.gpu_checks", description=__doc__)
    parser.add_argument("check", choices=sorted(CHECKS))
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    bench = Bench(rehearse=args.rehearse)
    made: dict[str, Any] = {}
    try:
        if not args.rehearse and not args.check.startswith("env."):
            bench.need_gpu()
        CHECKS[args.check](bench)
        made = {"checks": bench.checks, "figures": bench.figures}
    except Skip as reason:
        made = {"skipped": str(reason)}
    except (InsituError, RuntimeError) as error:
        line = " ".join(str(error).split())[:600]
        bench.add(args.check, ok=False, why=f"{type(error).__name__}: {line}")
        made = {"checks": bench.checks, "figures": bench.figures}
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
