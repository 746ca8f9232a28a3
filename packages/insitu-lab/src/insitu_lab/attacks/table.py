"""The report of `insitu attack` on a console: table of cells, failed cells."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.table import Table

from insitu_lab.attacks.matrix import ATTACKS, RESIDUAL, required, runners
from insitu_lab.attacks.model import Attack
from insitu_lab.attacks.run import AttackReport
from insitu_lab.attacks.runner import Cell

WIDTH = 150
"""Width of the table outside of a terminal."""


def console_on(stream: TextIO) -> Console:
    """Return a console whose tables are as wide as a terminal, else WIDTH."""
    return Console(file=stream, width=None if stream.isatty() else WIDTH)


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
