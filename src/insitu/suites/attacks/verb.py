"""Console view of `insitu attack`: table of cells, JSON line, failed cells."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import orjson
from rich.console import Console
from rich.table import Table

from insitu.cli.console import positional, shown_progress
from insitu.cli.report import EXIT_FAILED
from insitu.command import Arg, Json
from insitu.shutdown import run_interruptible
from insitu.suites.api import attack_async
from insitu.suites.attacks.matrix import ATTACKS, RESIDUAL, as_markdown, required, runners
from insitu.suites.attacks.model import Attack
from insitu.suites.attacks.run import AttackReport
from insitu.suites.attacks.runner import Cell

WIDTH = 150
"""Width of the table outside of a terminal."""


def attack(
    config: Annotated[
        str | None, Arg(positional=True, metavar="CONFIG", help="attack this file's tasks, in its sandboxes")
    ] = None,
    tasks: Annotated[int, Arg(metavar="N", help="tasks of your own (default: 3)")] = 3,
    runner: Annotated[str, Arg(metavar="A,B", help="grading runners (default: all)")] = "",
    only: Annotated[str, Arg(metavar="N,M-K", help="attacks by number (default: all)")] = "",
    json: Json = False,
    markdown: Annotated[bool, Arg(help="print the expected results and exit")] = False,
    overrides: Annotated[
        Sequence[str], Arg(positional=True, metavar="a.b=c", help="override a key, e.g. sandbox.backend")
    ] = (),
) -> int:
    """Exit code 0 if every cell is as required.

    Tasks of a configuration are attacked in the sandboxes of its [sandbox]; overrides under `tasks.` do the
    same. Raises ConfigError, TaskError, SetupError.
    """
    if markdown:
        print(as_markdown(), end="")
        return 0
    shown = sys.stderr if json else sys.stdout
    path, changes = positional(config, overrides)
    with shown_progress() as view:
        report = run_interruptible(
            attack_async(path, overrides=changes, only=only, runner=runner, tasks=tasks, progress=view)
        )
    print_report(report, Console(file=shown, width=None if shown.isatty() else WIDTH))
    if json:
        print(orjson.dumps(report.as_json()).decode())
    return EXIT_FAILED if report.failures else 0


def print_report(report: AttackReport, console: Console) -> None:
    """Print the table, the residual cells and the failures."""
    attacks = [attack for attack in ATTACKS if attack.id in report.attacks]
    names = [name for name in runners() if any(cell.runner == name for cell in report.cells)]
    found: dict[tuple[int, str], Cell] = {}
    for cell in report.cells:  # with many tasks, show a failed one
        if not cell.failures:
            found.setdefault((cell.id, cell.runner), cell)
        else:
            found[cell.id, cell.runner] = cell
    table = Table("#", "attack", *names, "twins", box=None, pad_edge=False)
    for attack in attacks:
        cells = [found[attack.id, name] for name in names if (attack.id, name) in found]
        mine = [cell for cell in report.cells if cell.id == attack.id]
        twins = f"{sum(cell.twins_ok for cell in mine)}/{sum(cell.twins for cell in mine)}"
        table.add_row(str(attack.id), attack.title, *(_word(attack, cell) for cell in cells), twins)
    console.print(table)
    for name in names:
        for number, reason in RESIDUAL[name].items():
            if (number, name) in found and found[number, name].residual:
                console.print(f"{name} {number} is residual: {reason}", markup=False, highlight=False)
    for failure in report.failures:
        where = f"{failure.runner} {failure.id}" if failure.id else f"{failure.runner}, not attacked"
        line = f"{where}: expected {failure.expected}; got {failure.got}"
        console.print(line, markup=False, highlight=False)
    for name in names:
        defeated, residual, tried = report.by_runner(name)
        rest = f", {residual} residual" if residual else ""
        console.print(f"{name}: {defeated} of {tried} attacks defeated{rest}", highlight=False)
    counts = report.as_json()
    summary = f"{counts['defeated']} of {counts['attacks']} attacks defeated by at least one runner, "
    console.print(summary + f"{counts['twins_ok']} of {counts['twins']} honest twins keep their reward")


def _word(attack: Attack, cell: Cell) -> str:
    if cell.residual:
        return f"residual ({cell.got})"
    if cell.failures:
        return f"FAILED {cell.got[:40]}"
    return cell.got if attack.id in RESIDUAL[cell.runner] else required(attack, cell.runner)
