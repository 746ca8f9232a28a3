"""What does the gateway cost per model call?

Run `python -m benchmarks gateway`. Three processes: the gateway alone with an engine that answers at once,
the agents, and this one. Agents hold conversations of a size (body bytes), echo each reply and answer its
tool call, so that every measured call is the next turn of a conversation (steady state); one connection
makes one call at a time. Reported per shape, medians over the rounds:

cpu_ms        CPU time of the gateway process per call, template and parsing of the reply with it, without
              `tokenizer_ms`.
tokenizer_ms  CPU time per call in the tokenizer: text to ids, ids to text.
added_ms      wall time from the first byte sent to the last received, all of it: the engine takes none.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks import _corpus
from benchmarks._arguments import Arguments, count
from benchmarks._peers import compare
from benchmarks._process import Process, running

SIZES = {"50KB": 50_000, "400KB": 400_000, "grown": 0}
"""Bytes around which calls are measured; 0 = from the second call of a conversation on."""
STEP = {"50KB": 600, "400KB": 2_600, "grown": 2_600}
"""Bytes of a tool's answer: about 10 and 100 turns lead to these sizes."""
GROWTH = 12
"""Stages of ten turns in which one conversation grows to 100,000 tokens."""
MEMORY_AT, RATE_AT = "50KB/1", ("50KB/32", "50KB/1")
"""Shapes whose memory and rate stand for all: many small conversations cost most per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One cell of the table."""

    size: str
    concurrency: int
    sessions: int
    turns: int
    """Measured calls per session."""
    stream: bool = True
    seeded: bool = False
    """The history comes with the first call, instead of growing turn by turn."""
    stages: int = 1
    """How often so many calls are measured, the conversations growing all the while."""

    @property
    def name(self) -> str:
        return f"{self.size}/{self.concurrency}" + ("" if self.stream else "/whole")

    def job(self, sessions: Mapping[str, Any]) -> dict[str, object]:
        return {
            **sessions,
            "size_bytes": SIZES[self.size],
            "step_bytes": STEP[self.size],
            "concurrency": self.concurrency,
            "turns": self.turns,
            "stream": self.stream,
            "seeded": self.seeded,
            "stages": self.stages,
        }


def shapes(quick: bool) -> list[Shape]:
    few = [
        Shape(size="50KB", concurrency=1, sessions=100, turns=5),
        Shape(size="400KB", concurrency=1, sessions=8, turns=20),
    ]
    if quick:
        return few
    return [
        *few,
        Shape(size="50KB", concurrency=1, sessions=20, turns=10, stream=False),
        Shape(size="50KB", concurrency=32, sessions=64, turns=10),
        Shape(size="50KB", concurrency=256, sessions=256, turns=10),
        Shape(size="400KB", concurrency=32, sessions=32, turns=10, seeded=True),
        Shape(size="400KB", concurrency=256, sessions=256, turns=5, seeded=True),
    ]


def warm(gateway: Process, size: str) -> None:
    """One conversation of the size, held no longer: what a process needs once is not what a token costs."""
    with running("benchmarks._load") as load:
        load.say(Shape(size=size, concurrency=1, sessions=1, turns=1).job(gateway.ask({"open": 1})))
        load.receive()
        load.say("go")
        load.receive()
    gateway.ask({"seal": 1})


def measure(model: Path, shape: Shape) -> dict[str, float]:
    """One round of one shape with a fresh gateway."""
    with (
        running("benchmarks._gateway_process", str(model)) as gateway,
        running("benchmarks._load") as load,
    ):
        warm(gateway, shape.size)
        before = gateway.ask({"mark": 1, "collect": 1})
        load.say(shape.job(gateway.ask({"open": shape.sessions})))
        load.receive()
        grown = gateway.ask({"mark": 1})
        load.say("go")
        result = load.receive()
        after = gateway.ask({"mark": 1, "collect": 1})
        sealed = gateway.ask({"seal": 1})
    calls = len(result["seconds"])
    tokenizer = (after["tokenizer_s"] - grown["tokenizer_s"]) / calls
    if after["defects"] or not sealed["balanced"] or after["calls"] - grown["calls"] != calls:
        raise RuntimeError(f"the gateway failed under load: {after} {sealed}")
    latency = 1e3 * np.array(result["seconds"])
    return {
        "cpu_ms": 1e3 * ((after["cpu_s"] - grown["cpu_s"]) / calls - tokenizer),
        "tokenizer_ms": 1e3 * tokenizer,
        "p50": float(np.percentile(latency, 50)),
        "p99": float(np.percentile(latency, 99)),
        "calls_per_s": calls / result["wall_s"],
        "calls": calls,
        "body_bytes": result["body_bytes"],
        "bytes_per_token": (after["rss_bytes"] - before["rss_bytes"]) / sealed["held"],
        "held_tokens": sealed["held"],
    }


def growth(model: Path) -> dict[str, Any]:
    """One conversation from its second turn to 100,000 tokens, in stages of ten turns."""
    shape = Shape(size="grown", concurrency=1, sessions=1, turns=10, stages=GROWTH)
    stages = []
    with (
        running("benchmarks._gateway_process", str(model)) as gateway,
        running("benchmarks._load") as load,
    ):
        warm(gateway, "50KB")
        load.say(shape.job(gateway.ask({"open": 1})))
        load.receive()
        for _ in range(shape.stages):
            before = gateway.ask({"mark": 1})
            load.say("go")
            result = load.receive()
            after = gateway.ask({"mark": 1})
            tokenizer = (after["tokenizer_s"] - before["tokenizer_s"]) / shape.turns
            stages.append(
                {
                    "body_bytes": round(result["body_bytes"]),
                    "cpu_ms": round(1e3 * ((after["cpu_s"] - before["cpu_s"]) / shape.turns - tokenizer), 3),
                    "tokenizer_ms": round(1e3 * tokenizer, 3),
                    "p50": round(1e3 * float(np.median(result["seconds"])), 3),
                }
            )
        sealed = gateway.ask({"seal": 1})
    if not sealed["balanced"]:
        raise RuntimeError(f"the gateway lost count while a conversation grew: {sealed}")
    return {"turns": shape.turns * shape.stages + 1, "tokens": sealed["held"], "stages": stages}


def beside(model: Path, rounds: int) -> dict[str, Any]:
    """Other gateways and ours over one and the same engine server, replies not streamed."""
    chosen = [
        Shape(size="50KB", concurrency=1, sessions=10, turns=10, stream=False),
        Shape(size="400KB", concurrency=1, sessions=2, turns=10, stream=False),
    ]
    return compare(model, {shape.size: (shape.job({}), shape.sessions) for shape in chosen}, rounds)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(float(np.median([r[name] for r in rounds])), 3) for name in rounds[0]}


def report(cells: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title="the gateway's cost per call, in ms")
    columns = ("cpu_ms", "tokenizer_ms", "p50", "p99", "calls_per_s", "bytes_per_token", "calls")
    for column in ("body/connections", *columns):
        table.add_column(column, justify="left" if "/" in column else "right")
    for name, cell in cells.items():
        table.add_row(name, *(f"{cell[c]:,.2f}" for c in columns))
    Console(stderr=True).print(table)


def report_peers(peers: Mapping[str, Any]) -> None:
    table = Table(title="beside others: CPU of the whole process and latency per call, in ms")
    for column in ("gateway", "body/connections", "cpu_ms", "p50", "p99", "rss_mb", "calls"):
        table.add_column(column, justify="left" if column in ("gateway", "body/connections") else "right")
    for name, cells in peers.items():
        if "skipped" in cells:
            table.add_row(name, "skipped", cells["skipped"])
            continue
        for shape, cell in cells["shapes"].items():
            table.add_row(
                name, shape, *(f"{cell[c]:,.2f}" for c in ("cpu_ms", "p50", "p99", "rss_mb", "calls"))
            )
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; one JSON object as the last line of stdout."""
    parser = Arguments(prog="benchmarks gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="no table, only the JSON line")
    parser.add_argument("--quick", action="store_true", help="one connection only, one round")
    parser.add_argument("--peers", action="store_true", help="also other gateways, installed if need be")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--only", default="", help="shapes whose name begins so, e.g. 50KB/256")
    args = parser.parse_args(argv)
    chosen = [shape for shape in shapes(args.quick) if shape.name.startswith(args.only)]
    if not (chosen or "growth".startswith(args.only)):
        parser.error(f"--only {args.only}: no shape begins so")
    cells: dict[str, dict[str, float]] = {}
    loads = [os.getloadavg()[0]]
    peers: dict[str, Any] = {}
    grown: dict[str, Any] = {}
    rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory(prefix="insitu-bench-") as folder:
        model = _corpus.write_model(Path(folder))
        for shape in chosen:
            cells[shape.name] = medians([measure(model, shape) for _ in range(rounds)])
            loads.append(os.getloadavg()[0])
        if "growth".startswith(args.only):
            grown = growth(model)
        if args.peers:
            peers = beside(model, rounds)
        loads.append(os.getloadavg()[0])
    if not args.json:
        report(cells)
        report_peers(peers)
    print(orjson.dumps(summary(cells, loads, grown, peers)).decode())
    return 0


def summary(
    cells: Mapping[str, Mapping[str, float]],
    loads: Sequence[float],
    grown: Mapping[str, Any],
    peers: Mapping[str, Any],
) -> dict[str, Any]:
    one = {size: cells[f"{size}/1"] for size in SIZES if f"{size}/1" in cells}
    rate_at = next((name for name in RATE_AT if name in cells), "")
    return {
        "cpu_ms": {size: cell["cpu_ms"] for size, cell in one.items()},
        "tokenizer_ms": {size: cell["tokenizer_ms"] for size, cell in one.items()},
        "added_ms": {size: {"p50": cell["p50"], "p99": cell["p99"]} for size, cell in one.items()},
        "calls_per_s": cells[rate_at]["calls_per_s"] if rate_at else None,
        "calls_per_s_at": rate_at,
        "bytes_per_token": cells[MEMORY_AT]["bytes_per_token"] if MEMORY_AT in cells else None,
        "bytes_per_token_at": MEMORY_AT if MEMORY_AT in cells else "",
        "load_average": [round(v, 2) for v in loads],
        "shapes": cells,
        "growth": grown,
        "peers": peers,
    }


if __name__ == "__main__":
    sys.exit(main())
