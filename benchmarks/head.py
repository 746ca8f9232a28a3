"""`python -m benchmarks head`: time and memory of one pass of the policy-gradient head, against the bare
products.

Correctness first, against float64, over positions of several tiles. Then medians, the sides taking turns.
The floor is what the three matrix products of a head cannot be faster than: measured bare in this run on a
CPU (in seconds of CPU time); on an H200, 6 N V H operations at the 788 TFLOP/s that its largest products
reach. `extra_gib` is the peak beyond what was there before, beside the gradients. insitu's weight is float32,
as the trainer keeps it: what is cast of it to the type computed in counts, in bytes and in time. Shapes: a
CPU gets small ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks._arguments import Arguments, chosen_device, count, share, wide_console
from benchmarks._head_sides import Grads, Problem, Side, problem, sides
from insitu_train.loss.chunked_logits import tiling

RATE = {"H200": 788e12}
"""Operations per second of the largest bf16 products, by a word in the device's name."""
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error of insitu's gradients, as a share of the largest number in them."""
PRINTED = ("positions", "hidden", "trained", "ms", "floor_ms", "extra_gib", "peers")
"""What the JSON has of a case; the rest is in the table."""
WARM_UPS = 3
BEYOND = 37
"""Positions of the correctness check beyond two whole tiles."""
SECONDS = 3.0
"""Time after which a side's repeats of one case end, three at the least."""


@dataclass(frozen=True, slots=True)
class Shape:
    positions: int
    hidden: int
    trained: float


def shapes(gpu: bool, args: argparse.Namespace) -> list[Shape]:
    hidden = args.hidden or ([1024, 2048, 2560, 4096] if gpu else [256, 1024])
    positions = args.positions or ([8192, 32768, 152_000] if gpu else [2048])
    return [Shape(n, h, t) for h in hidden for n in positions for t in args.trained or [1.0, 0.25]]


def clock(device: torch.device) -> float:
    """Seconds: of CPU time on a CPU, which others may use too; of wall time on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def medians(runs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each, taking turns, after warm-ups. One that runs out of memory is left out."""
    seen: dict[str, list[float]] = {}
    for turn in range(WARM_UPS + repeats):
        for name, run in runs.items():
            if turn > WARM_UPS + 2 and sum(seen.get(name, [])) > SECONDS:
                continue
            begin = clock(device)
            try:
                run()
            except torch.OutOfMemoryError:
                seen.pop(name, None)
                torch.cuda.empty_cache()
                continue
            if turn >= WARM_UPS:
                seen.setdefault(name, []).append(clock(device) - begin)
    return {name: float(np.median(values)) * 1e3 for name, values in seen.items()}


def bare(p: Problem) -> Callable[[], object]:
    """The three products of a head over its trained positions, in tiles as large as insitu's, and no more."""
    n, width, vocab = p.trained, p.hidden.shape[1], p.weight.shape[0]
    cut = tiling(n, width, vocab, element=p.hidden.element_size(), gpu=p.hidden.is_cuda)
    h = p.hidden[: cut.rows].contiguous()
    e = torch.randn(len(h), vocab, device=h.device).to(h.dtype)
    out, d_weight = torch.empty_like(h), torch.zeros_like(p.weight)

    def run() -> None:
        for at in range(0, n, cut.rows):
            rows = min(cut.rows, n - at)
            torch.mm(h[:rows], p.weight.T, out=e[:rows])
            torch.mm(e[:rows], p.weight, out=out[:rows])
            d_weight.addmm_(e[:rows].T, h[:rows])

    return run


@contextlib.contextmanager
def peak(device: torch.device, found: list[int]) -> Iterator[None]:
    """Append the most bytes held at once within, beyond those held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        found.append(torch.cuda.max_memory_allocated() - before)
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    held = most = 0
    events = profiler.profiler.kineto_results.events() if profiler.profiler else []
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    found.append(most)


def extra(p: Problem, side: Side) -> float:
    """GiB beyond the gradients; trained states are gathered by every side and count as one of them."""
    found: list[int] = []
    with peak(p.hidden.device, found):
        grads = side(p)
    own = [grads.d_weight, grads.d_hidden]
    inputs = p.trained * p.hidden.shape[1] * p.hidden.element_size()
    return (found[0] - inputs - sum(t.numel() * t.element_size() for t in own)) / 2**30


def reference(p: Problem) -> Grads:
    """float64, over whole logits of some positions at a time."""
    hidden, weight = p.hidden[p.mask].double(), p.weight.double()
    targets, mu, a = p.targets[p.mask], p.mu[p.mask].double(), p.advantage[p.mask].double()
    logps, d_hidden, d_weight = [], [], torch.zeros_like(weight)
    for at in range(0, p.trained, 512):
        part = slice(at, at + 512)
        h, w = hidden[part].requires_grad_(), weight.requires_grad_()
        logp = torch.log_softmax(h @ w.T, -1).gather(1, targets[part, None])[:, 0]
        ratio = (logp - mu[part]).exp()
        loss = -torch.minimum(ratio * a[part], ratio.clamp(0.8, 1.28) * a[part]).sum() / p.trained
        by_hidden, by_weight = torch.autograd.grad(loss, [h, w])
        logps.append(logp.detach())
        d_hidden.append(by_hidden)
        d_weight += by_weight
    return Grads(torch.cat(logps), torch.cat(d_hidden), d_weight)


def errors(found: Grads, true: Grads) -> dict[str, float]:
    """Largest differences: of log-probabilities in nats, of gradients as a share of their largest number."""

    def far(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).abs().max() / b.abs().max())

    result = {
        "d_hidden": far(found.d_hidden, true.d_hidden),
        "d_weight": far(found.d_weight, true.d_weight),
    }
    if found.logp is not None and true.logp is not None:
        result["logp"] = float((found.logp.double() - true.logp).abs().max())
    return result


def floor_ms(p: Problem, bare_ms: float) -> float:
    if not p.hidden.is_cuda:
        return bare_ms
    name = torch.cuda.get_device_name()
    rate = next((r for word, r in RATE.items() if word in name), 0.0)
    return 6e3 * p.trained * p.weight.shape[0] * p.hidden.shape[1] / rate if rate else bare_ms


def checked(shape: Shape, vocab: int, device: torch.device, found: dict[str, Side]) -> dict[str, Any]:
    """Errors of each side over positions that fill two tiles and begin a third."""
    element = 2 if device.type == "cuda" else 4
    rows = tiling(1 << 20, shape.hidden, vocab, element=element, gpu=device.type == "cuda").rows
    positions = math.ceil((2 * rows + BEYOND) / shape.trained)
    some = problem(
        positions=positions, hidden=shape.hidden, vocab=vocab, trained=shape.trained, device=device
    )
    true = reference(some)
    wrong = {}
    for name, side in found.items():
        # one advantage for each sequence is all that Liger takes: its gradients are of another loss
        if name != "liger":
            with contextlib.suppress(torch.OutOfMemoryError):
                wrong[name] = errors(side(some), true)
    return wrong


def measure(shape: Shape, vocab: int, device: torch.device, found: dict[str, Side], repeats: int) -> Any:
    """One case."""
    wrong = checked(shape, vocab, device, found)
    p = problem(
        positions=shape.positions, hidden=shape.hidden, vocab=vocab, trained=shape.trained, device=device
    )
    runs: dict[str, Callable[[], object]] = {"bare": bare(p)}
    runs |= {name: partial(side, p) for name, side in found.items()}
    times = medians(runs, repeats, device)
    insitu = times["insitu"]
    floor = floor_ms(p, times["bare"])
    return {
        "positions": shape.positions,
        "hidden": shape.hidden,
        "trained": shape.trained,
        "vocab": vocab,
        "ms": round(insitu, 3),
        "floor_ms": round(floor, 3),
        "ratio": round(insitu / floor, 3),
        "bare_ms": round(times["bare"], 3),
        "extra_gib": float(f"{extra(p, found['insitu']):.4g}"),
        "peers": {name: _rounded(times.get(name)) for name in found if name != "insitu"},
        "errors": {name: {k: float(f"{v:.2g}") for k, v in e.items()} for name, e in wrong.items()},
    }


def _rounded(ms: float | None) -> float | str:
    return "out of memory" if ms is None else round(ms, 3)


def report(cases: list[Any], where: str, absent: dict[str, str]) -> None:
    table = Table(title=f"one pass of the policy-gradient head ({where})")
    columns = ("positions", "hidden", "vocab", "trained", "ms", "floor", "of it", "bare", "extra GiB")
    for column in (*columns, "error", "peers (ms)"):
        table.add_column(column, justify="right")
    for c in cases:
        peers = ", ".join(f"{name} {ms}" for name, ms in c["peers"].items())
        numbers = [
            *(c["positions"], c["hidden"], c["vocab"], c["trained"], c["ms"], c["floor_ms"]),
            *(f"{c['ratio']} x", c["bare_ms"], c["extra_gib"], max(c["errors"]["insitu"].values()), peers),
        ]
        table.add_row(*map(str, numbers))
    console = wide_console()
    console.print(table)
    for name, reason in absent.items():
        console.print(f"{name} is not there: {reason}", markup=False)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Arguments(prog="benchmarks head", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--positions", type=count, nargs="+")
    parser.add_argument("--hidden", type=count, nargs="+")
    parser.add_argument("--trained", type=share, nargs="+", help="shares of positions that are trained")
    parser.add_argument("--vocab", type=count, help="151936 on a GPU, 8192 on a CPU unless given")
    parser.add_argument("--repeats", type=count, default=10)
    parser.add_argument("--threads", type=count, default=1, help="on a CPU")
    parser.add_argument("--no-peers", action="store_true", help="measure insitu alone")
    parser.add_argument("--json", action="store_true", help="print only the JSON")
    args = parser.parse_args(argv)
    args.device = chosen_device(parser, args.device)
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print; JSON on stdout. Status 1 when insitu's own gradients are wrong."""
    args = parsed(argv)
    gpu = args.device == "cuda"
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    found, absent = sides(device, peers=not args.no_peers)
    vocab = args.vocab or (151_936 if gpu else 8192)
    cases = [measure(s, vocab, device, found, args.repeats) for s in shapes(gpu, args)]
    if not args.json:
        where = torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {args.threads} threads"
        time_of = "wall" if gpu else "CPU"
        report(cases, f"{where}, torch {torch.__version__}, {time_of} time", absent)
    print(json.dumps({"cases": [{name: case[name] for name in PRINTED} for case in cases]}))
    limit = ERRORS[torch.bfloat16 if gpu else torch.float32]
    grads = [c["errors"]["insitu"][k] for c in cases for k in ("d_hidden", "d_weight")]
    return 0 if max(grads) <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
