"""`python -m benchmarks long`: one long row through a full training step of a Qwen3 shape, random weights.

Per case: the peak of the allocator, what the predictor said from the configuration alone before anything
ran, and tokens per second of the step (forward, backward, update; a quarter of the tokens trained). The step
is the trainer's own, with the memory techniques it chooses by itself. Beside it in this run, transformers as
it comes: gradient checkpointing, SDPA, whole logits. On a GPU the real shapes; on a CPU small ones, there
with room for the plain path and with room for less, the peak being every allocation of torch's allocator;
and for the real ones what is predicted for an H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks._arguments import Arguments, count, wide_console
from insitu.errors import TrainError
from insitu.types import Ledger
from insitu_train.memory.peak import peak_bytes
from insitu_train.memory.plan import KEPT_FREE, LADDER, load_of
from insitu_train.memory.predict import GIB, MemoryModel
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.model.hf import HfPolicy, adopt
from insitu_train.options import OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.step import PlanRow, StepPlan
from insitu_train.trainer.trainer import Trainer

TRAINED = 0.25
"""Share of the tokens that are trained: those at the end, so that nothing is cut off."""
PUBLISHED = {("0.6b", 16384): 11_900, ("0.6b", 65536): 10_150}
"""Tokens per second of prime-rl on one H100, as published (benchmarks/results/BENCHMARKS.md, 2026-02-01)."""
LEAST = 64
"""Tokens of the shortest row."""
ONE_STEP_ABOVE = 152_000
"""Longer rows are timed once."""

_REAL = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {**_REAL, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 3072},
    "1.7b": {**_REAL, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 6144},
    "4b": {**_REAL, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 9728},
    "3m": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
           "head_dim": 32, "intermediate_size": 576, "vocab_size": 2048, "tie_word_embeddings": True},
    "9m": {"hidden_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
           "head_dim": 48, "intermediate_size": 896, "vocab_size": 8192, "tie_word_embeddings": False},
}  # fmt: skip
ON_GPU = [
    ("0.6b", 16384, 0.0), ("0.6b", 65536, 0.0), ("0.6b", 152_000, 0.0), ("0.6b", 152_000, 40.0),
    ("0.6b", 600_000, 0.0), ("1.7b", 152_000, 0.0), ("1.7b", 600_000, 0.0), ("4b", 65536, 0.0),
    ("4b", 350_000, 0.0),
]  # fmt: skip
"""Shape, tokens, and the GiB that training may fill; 0 = what there is."""
ON_CPU = [("3m", 2048, 0.0), ("3m", 6144, 0.0), ("9m", 3072, 0.0)]
H200_GIB, HOST_GIB = 139.0 * (1.0 - KEPT_FREE), 115.0
"""Of one H200 what training may fill, and of its host what is free, for predictions."""


@dataclass(kw_only=True)
class Case:
    """One line of the result."""

    model: str
    tokens: int
    peak_gib: float = 0.0
    predicted_gib: float = 0.0
    tokens_per_s: float = 0.0
    peers: dict[str, Any] = field(default_factory=dict)
    techniques: str = ""
    memory_gib: float = 0.0
    """What training may fill; 0 = what there is."""
    error: str = ""
    """Why it did not run."""

    def reported(self) -> dict[str, Any]:
        """Of it in the JSON: null for what was not measured."""
        return {
            "model": self.model,
            "tokens": self.tokens,
            "peak_gib": None if self.error else self.peak_gib,
            "predicted_gib": self.predicted_gib or None,
            "tokens_per_s": None if self.error else self.tokens_per_s,
            "peers": self.peers,
            "memory_gib": self.memory_gib or None,
            "techniques": self.techniques or None,
        }


def configuration(shape: str) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[shape], max_position_embeddings=1 << 20, use_cache=False)


def one_row(tokens: int, vocab: int) -> StepPlan:
    """A plan of one row in one micro-batch."""
    rng = np.random.default_rng(0)
    mask = np.arange(tokens) >= tokens - int(tokens * TRAINED)
    row = PlanRow(
        group_id="bench/0",
        rollout_id="bench/0/0",
        segment=0,
        advantage=0.5,
        weight=1.0 / int(mask.sum()),
        ids=rng.integers(0, vocab, tokens).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
        versions=np.zeros(tokens, np.int32),
    )
    batch = MicroBatch(prefix=int(mask.argmax()), rows=(0,), tokens=tokens)
    trained = int(mask.sum())
    account = Ledger(captured=trained, trained=trained, excluded={})
    return StepPlan(rows=(row,), batches=(batch,), ledger=account, groups=1)


def policy_of(config: Any, device: torch.device, dtype: torch.dtype) -> HfPolicy:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    with device:
        model = build(config, dtype=torch.float32, attn_implementation="eager")
    return adopt(model, device=device, dtype=dtype)


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(case: Case, device: torch.device, repeats: int) -> None:
    """insitu's own step: fills in the case."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = configuration(case.model)
    plan = one_row(case.tokens, config.vocab_size)
    settings = TrainConfig(
        optim=OptimConfig(lr=1e-6),
        policy=PolicyConfig(kind="hf", memory_gib=case.memory_gib),
        max_logprob_gap=1e3,
        max_staleness=1 << 20,
        threads=torch.get_num_threads(),
    )
    trainer = Trainer(policy_of(config, device, dtype), settings)
    trainer.step(one_row(256, config.vocab_size))  # the optimiser's moments are there from now on
    if trainer.fit is None:
        raise RuntimeError("the trainer chooses no techniques")
    chosen = next(t for t in trainer.fit.plan(plan) if isinstance(t, MemoryOptions))
    kernels = "cuda" if device.type == "cuda" else "cpu"
    model = MemoryModel(config, dtype=dtype, lora=None, kernels=kernels)  # type: ignore[arg-type]
    case.techniques = str(chosen)
    case.predicted_gib = model.predict(load_of(plan, plan.batches[0]), chosen).peak / GIB
    if chosen.offload_optimizer:
        trainer.optimiser.park()
    held = sum(p.nbytes for _, p in trainer.model.named_parameters())
    held += sum(t.nbytes for t in trainer.optimiser.tensors().values() if t.device.type == device.type)
    case.peak_gib = (held + peak_bytes(lambda: trainer.step(plan), device)) / GIB
    once = case.tokens > ONE_STEP_ABOVE
    case.tokens_per_s = case.tokens / timed(lambda: trainer.step(plan), device, 1 if once else repeats)


def naive(case: Case, device: torch.device, repeats: int) -> dict[str, float]:
    """transformers as it comes: a step of the same row, whole logits in fp32, weights of the compute type."""
    from transformers import AutoModelForCausalLM

    config = configuration(case.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    build: Any = AutoModelForCausalLM.from_config
    with device:
        model = build(config, dtype=dtype, attn_implementation="sdpa").train()
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    row = one_row(case.tokens, config.vocab_size).rows[0]
    ids = torch.from_numpy(row.ids.astype(np.int64))[None].to(device)
    mask = torch.from_numpy(row.mask)[None].to(device)

    def step() -> None:
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float(), -1)
        chosen = logp.gather(2, ids[:, 1:, None])[..., 0]
        loss = -(chosen * mask[:, 1:]).sum() / mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()  # its moments are there from now on
    optimiser.zero_grad()
    held = 3 * sum(p.nbytes for p in model.parameters())
    first = peak_bytes(step, device)
    return {"peak_gib": (held + first) / GIB, "tokens_per_s": case.tokens / timed(step, device, repeats)}


def peers(case: Case, device: torch.device, repeats: int, *, run: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (case.model, case.tokens) in PUBLISHED:
        found["prime_rl_published_h100"] = {"tokens_per_s": PUBLISHED[case.model, case.tokens]}
    if run and case.tokens <= ONE_STEP_ABOVE:
        try:
            found["transformers"] = naive(case, device, repeats)
        except torch.OutOfMemoryError:
            found["transformers"] = {"error": "out of memory"}
    return found


def tight(case: Case) -> float:
    """GiB in which the plain path of a case on the CPU does not fit, and most others do."""
    model = MemoryModel(configuration(case.model), dtype=torch.float32, lora=None, kernels="cpu")
    plan = one_row(case.tokens, int(SHAPES[case.model]["vocab_size"]))
    plain = model.predict(load_of(plan, plan.batches[0]), PLAIN)
    return (plain.update + 0.6 * (plain.peak - plain.update)) / GIB


def cases(args: argparse.Namespace, gpu: bool) -> list[Case]:
    chosen = ON_GPU if gpu else ON_CPU
    if args.models:
        tokens = args.tokens or sorted({n for _, n, _ in chosen})
        chosen = [(m, n, 0.0) for m in args.models for n in tokens]
    made = [Case(model=m, tokens=n, memory_gib=gib) for m, n, gib in chosen]
    if not gpu:
        made += [replace(case, memory_gib=tight(case)) for case in made]
    return made


def expected(model: str, tokens: int, memory_gib: float) -> dict[str, Any]:
    """What a step on an H200 would take with the techniques that would be chosen there; nothing is run."""
    predictor = MemoryModel(configuration(model), dtype=torch.bfloat16, lora=None, kernels="cuda")
    plan = one_row(tokens, int(SHAPES[model]["vocab_size"]))
    load = load_of(plan, plan.batches[0])
    reported: dict[str, Any] = {"model": model, "tokens": tokens, "memory_gib": memory_gib or None}
    for techniques in LADDER:
        found = predictor.predict(load, techniques)
        if found.peak <= (memory_gib or H200_GIB) * GIB and found.host <= HOST_GIB * GIB:
            sizes = {"predicted_gib": found.peak / GIB, "host_gib": found.host / GIB}
            return {**reported, **sizes, "techniques": str(techniques)}
    return {**reported, "predicted_gib": None, "host_gib": None, "techniques": None}


def report(found: list[Case], where: str) -> None:
    columns = ("model", "tokens", "peak GiB", "predicted", "off", "tokens/s", "techniques", "transformers")
    table = Table(*columns, title=where)
    for case in found:
        off = case.predicted_gib / case.peak_gib - 1.0 if case.peak_gib else 0.0
        table.add_row(
            *(case.model, f"{case.tokens:,}", f"{case.peak_gib:.3f}", f"{case.predicted_gib:.3f}"),
            *(f"{off:+.1%}", f"{case.tokens_per_s:,.0f}", "did not run" if case.error else case.techniques),
            ", ".join(f"{v:.3g} {k}" for k, v in case.peers.get("transformers", {}).items() if k != "error"),
        )
    wide_console().print(table)


def let_go(gpu: bool) -> None:
    """Models of the case before, should anything hold them in a cycle, and what torch keeps for re-use."""
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Arguments(prog="benchmarks long", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), help="shapes; default: the device's")
    parser.add_argument("--tokens", nargs="+", type=count, help="lengths, with --models")
    parser.add_argument("--repeats", type=count, default=3, help="timed steps up to 152,000 tokens")
    parser.add_argument("--threads", type=count, default=1, help="torch threads on a CPU")
    parser.add_argument("--no-peers", action="store_true", help="insitu alone")
    args = parser.parse_args(argv)
    if args.tokens and not args.models:
        parser.error("--tokens needs --models: the shapes that are given these lengths")
    if args.tokens and min(args.tokens) < LEAST:
        parser.error(f"--tokens {min(args.tokens)}: a row has {LEAST} tokens or more")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print; JSON on stdout. Status 1 when a prediction is off by more than 5 %."""
    args = parsed(argv)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.set_num_threads(args.threads)
    found = []
    for case in cases(args, gpu):
        try:
            measure(case, device, args.repeats)
        except (TrainError, torch.OutOfMemoryError) as error:
            case.error = str(error).partition("\n")[0]
        let_go(gpu)
        case.peers = peers(case, device, args.repeats, run=not args.no_peers)
        let_go(gpu)
        found.append(case)
    for case in found:
        if case.error:
            print(f"{case.model} at {case.tokens:,} tokens: {case.error}", file=sys.stderr)
    if not args.json:
        device_name = torch.cuda.get_device_name() if gpu else platform.machine()
        report(found, f"{device_name}, torch {torch.__version__}")
    reported: dict[str, Any] = {"cases": [case.reported() for case in found]}
    if not gpu and not args.models:
        reported["not_measured"] = [expected(*case) for case in ON_GPU]
    print(json.dumps(reported))
    return 1 if any(c.error or abs(c.predicted_gib / c.peak_gib - 1.0) > 0.05 for c in found) else 0


if __name__ == "__main__":
    sys.exit(main())
