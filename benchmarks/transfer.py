"""`python -m benchmarks transfer`: train inside one agent, evaluate inside each: a matrix of agents.

One small model learns the tools of five agents from demonstrations (`_transfer_warm`), then is trained on toy
tasks inside one of them, or inside all, and solves held-out tasks inside each. What is finished stays in the
output folder: a later call makes what is missing, so the matrix may be made in several sittings.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks._arguments import Arguments, amount, count, wide_console
from benchmarks._transfer_report import LABELS, costs, matrix, read_cells
from benchmarks._transfer_runs import (
    AGENTS,
    ALL,
    GROUP_SIZE,
    GROUPS,
    ROWS,
    START,
    STEPS,
    TASKS,
    Cell,
    Late,
    Workshop,
    cells,
    training_facts,
)
from insitu.errors import InsituError, TrainError

GATE = (0.01, 0.5)
"""Held-out solve rates of the warm start inside an agent between which training inside it makes sense."""


def run_of(text: str) -> tuple[str, int]:
    """Return (row, seed) of `ROW:SEED`."""
    row, _, seed = text.partition(":")
    if row not in ROWS or not seed.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW:SEED with a row of {', '.join(ROWS)}")
    return row, int(seed)


def note(text: str) -> None:
    print(f"transfer: {text}", file=sys.stderr, flush=True)


def check_start(shop: Workshop, planned: Sequence[Cell], row: str) -> None:
    """Raise TrainError if the warm start solves too little or too much inside an agent to train inside it."""
    for cell in matrix(read_cells(shop, [cell for cell in planned if cell.row == START])):
        value = cell["rate"]["value"]
        if row in (cell["agent"], ALL) and not GATE[0] <= value <= GATE[1]:
            raise TrainError(
                f"the warm start solves {value} of the held-out tasks inside {cell['agent']}, "
                f"not {GATE[0]} to {GATE[1]}: nothing is trained from it"
            )


def run_cells(shop: Workshop, planned: Sequence[Cell], chosen: Sequence[Cell]) -> None:
    """Make what is missing of these cells. Raises Late, InsituError."""
    missing = [cell for cell in chosen if not shop.cell_file(cell).exists()]
    if not missing:
        return
    from benchmarks._transfer_warm import make

    warm = make(shop.folder, AGENTS, note, shop.ends)
    for cell in missing:
        started = time.monotonic()
        if cell.row != START:
            check_start(shop, planned, cell.row)
        model = warm if cell.row == START else shop.train(cell.row, cell.seed, warm)
        shop.measure(cell, model)
        note(f"{cell.name} in {time.monotonic() - started:.0f} s")


def result(shop: Workshop, planned: Sequence[Cell]) -> dict[str, Any]:
    """Return the matrix of what is there, and the names of cells that are not."""
    files = read_cells(shop, planned)
    trained = dict.fromkeys((cell.row, cell.seed) for cell in files if cell.row != START)
    return {
        "steps": shop.steps,
        "rollouts": shop.steps * GROUPS * GROUP_SIZE,
        "tasks": shop.tasks,
        "labels": LABELS,
        "cells": matrix(files),
        "training": [
            {"row": row, "seed": seed, **training_facts(shop.folder, row, seed)} for row, seed in trained
        ],
        "cpu_s_per_rollout": costs(shop.folder, planned, shop.tasks),
        "missing": [cell.name for cell in planned if cell not in files],
    }


def report(found: dict[str, Any]) -> None:
    table = Table(
        "trained inside", "seeds", *(LABELS[agent] for agent in AGENTS), title="held-out solve rate"
    )
    known = {(cell["row"], cell["agent"]): cell for cell in found["cells"]}
    for row in (START, *AGENTS, ALL):
        there = [known[row, agent] for agent in AGENTS if (row, agent) in known]
        texts = [
            "{value:.2f} ({low:.2f} to {high:.2f})".format(**known[row, agent]["rate"])
            if (row, agent) in known
            else ""
            for agent in AGENTS
        ]
        table.add_row(LABELS[row], str(max((len(cell["seeds"]) for cell in there), default=0)), *texts)
    wide_console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing until the deadline, print the table, and JSON as the last line."""
    parser = Arguments(prog="benchmarks transfer", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"), help="folder of what is kept")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--only", type=run_of, nargs="+", metavar="ROW:SEED", help="make these runs only")
    parser.add_argument("--deadline-s", type=amount, help="stop after this time; a later call goes on")
    parser.add_argument("--report", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args(argv)
    # The command that runs would go on alone.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.deadline_s if args.deadline_s else float("inf")
    shop = Workshop(folder=out, ends=ends, steps=STEPS, tasks=TASKS)
    planned = list(cells(range(args.seeds)))
    chosen = [cell for cell in planned if not args.only or (cell.row, cell.seed) in args.only]
    try:
        if not args.report:
            run_cells(shop, planned, chosen)
    except Late:
        note("the deadline has passed; the next call goes on")
    except InsituError as error:
        print(f"insitu: {error}", file=sys.stderr)
        return 2
    found = result(shop, planned)
    report(found)
    print(json.dumps(found))
    return 0
