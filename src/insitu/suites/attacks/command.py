"""The verb `insitu attack`: table of cells, JSON line, failed cells."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.runtime.sandboxes import UNSUPPORTED, check_tasks, make_backend
from insitu.sandbox.base import SandboxBackend
from insitu.shutdown import run_interruptible
from insitu.suites.attacks.matrix import ATTACKS, RESIDUAL, as_markdown, required, runners
from insitu.suites.attacks.model import Attack
from insitu.suites.attacks.run import AttackReport, run_matrix
from insitu.suites.attacks.runner import NAIVE_WORK_BYTES, Cell
from insitu.suites.attacks.target import target_for
from insitu.suites.attacks.user_tasks import run_user_tasks, user_targets
from insitu.view.open import open_view

WIDTH = 150
"""Width of the table outside of a terminal."""


def chosen_attacks(text: str) -> tuple[Attack, ...]:
    """Return the attacks of `1,4,10-12`; all for "". Raises ConfigError."""
    wanted: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if found is None:
            raise ConfigError(f"--only takes numbers of attacks, like 1,4,10-12; got {part!r}")
        wanted |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    unknown = sorted(wanted - {attack.id for attack in ATTACKS})
    if unknown:
        raise ConfigError(f"no attack {unknown[0]}; there are 1 to {len(ATTACKS)}")
    return tuple(attack for attack in ATTACKS if not wanted or attack.id in wanted)


def chosen_runners(text: str) -> tuple[str, ...]:
    """Return the runners of `a,b`; all for "". Raises ConfigError."""
    known = runners()
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"no runner {unknown[0]} in the matrix; there are: {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def open_backends(config: Config) -> tuple[SandboxBackend, SandboxBackend]:
    """Return the backend, and one for the careless grader; no fallback. Raises ConfigError, SetupError."""
    if config.sandbox.backend == "harbor":
        why = UNSUPPORTED["harbor"]["gateway_only"]
        raise ConfigError(
            f"insitu attack needs sandboxes in which agents run; sandbox.backend = harbor: {why}"
        )
    check_tasks(config, [target_for("json_io").task])
    return make_backend(config), make_backend(config, work_bytes=NAIVE_WORK_BYTES)


def run(options: argparse.Namespace, path: Path | None, overrides: Sequence[str]) -> bool:
    """Run the verb; return whether every cell is as required.

    `path`: configuration whose tasks are attacked in the sandboxes of its [sandbox]; overrides under
    `tasks.` do the same. Raises ConfigError, TaskError, SetupError.
    """
    if options.markdown:
        print(as_markdown(), end="")
        return True
    attacks, names = chosen_attacks(options.only), chosen_runners(options.runner)
    shown = sys.stderr if options.json else sys.stdout
    config = load_config(path, overrides)
    backend, careless = open_backends(config)
    if path is None and not any(one.startswith("tasks.") for one in overrides):
        with _progress(len(attacks) * len(names)) as note:
            report = run_interruptible(run_matrix(attacks, names, backend, careless, note))
    else:
        name = str(path or config.tasks.path or config.tasks.source)
        found = user_targets(config, name, options.tasks, _say)
        subjects = [one for one in found if one.task.grading.runner in names]
        if not subjects:
            raise ConfigError(f"no task of {name} asks for runner {', '.join(names)}")
        check_tasks(config, [one.task for one in subjects])
        attacks = tuple(attack for attack in attacks if attack.portable)
        if not attacks:
            raise ConfigError(
                f"attacks {options.only} know the reference subject; none can be tried on {name}"
            )
        names = tuple(dict.fromkeys(one.task.grading.runner for one in subjects))
        with _progress(len(attacks) * len(subjects)) as note:
            report = run_interruptible(run_user_tasks(attacks, subjects, backend, note))
    print_report(report, attacks, names, Console(file=shown, width=None if shown.isatty() else WIDTH))
    if options.json:
        print(orjson.dumps(report.as_json()).decode())
    return not report.failures


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _progress(cells: int) -> Iterator[Callable[[Cell], None]]:
    """Yield a callback that shows each finished cell."""
    view = open_view(sys.stderr)
    done = itertools.count(1)

    def note(cell: Cell) -> None:
        view.note(f"{cell.runner} {cell.id} {'FAILED' if cell.failures else 'ok'}")
        view.advance(next(done))

    try:
        view.stage("attacking", cells)
        yield note
    finally:
        view.close()


def print_report(
    report: AttackReport, attacks: Sequence[Attack], names: Sequence[str], console: Console
) -> None:
    """Print the table, the residual cells and the failures."""
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
