"""The verb: agents one after the other, a table, the JSON line, and what failed in words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from insitu.errors import ConfigError
from insitu.sandbox.local import LocalBackend
from insitu.shutdown import run_interruptible
from insitu.suites.conformance.agent_tools import PLAYS
from insitu.suites.conformance.checks import ConformanceResult
from insitu.suites.conformance.run import conform

LOG_TAIL = 2000
WIDTH = 130
"""Of the table where it goes to no terminal."""


def chosen(text: str) -> list[str]:
    """Agents from `a,b@VERSION`; the pinned ones of all from an empty text. Raises ConfigError."""
    given = [name.strip().partition("@") for name in text.split(",") if name.strip()]
    names = [name.replace("-", "_") + at + version for name, at, version in given] or list(PLAYS)
    unknown = sorted({name.partition("@")[0] for name in names} - set(PLAYS))
    if unknown:
        raise ConfigError(f"no conformance run for {', '.join(unknown)}; there are: {', '.join(PLAYS)}")
    return list(dict.fromkeys(names))


def run(agents: str, *, json: bool, record: Path | None) -> bool:
    """True when every agent passed. Raises ConfigError and SetupError."""
    names = chosen(agents)
    shown = sys.stderr if json else sys.stdout
    findings = run_interruptible(_conform_all(names, record))
    print_report(findings, Console(file=shown, width=None if shown.isatty() else WIDTH))
    if json:
        line = {"agents": {name: finding.as_json() for name, finding in findings.items()}}
        print(orjson.dumps(line).decode())
    return all(finding.ok for finding in findings.values())


async def _conform_all(names: Sequence[str], record: Path | None) -> dict[str, ConformanceResult]:
    backend = LocalBackend()
    findings = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        findings[name] = await conform(name, backend, record)
    return findings


def print_report(findings: Mapping[str, ConformanceResult], console: Console) -> None:
    table = Table("agent", "version", "ok", box=None, pad_edge=False)
    for head in ("calls", "sampled", "trained", "excluded", "unexplained"):
        table.add_column(head, justify="right")
    for head in ("compactions", "sub-agents", "odd splits", "seconds"):
        table.add_column(head, justify="right")
    for name, found in findings.items():
        excluded = ", ".join(f"{n} {reason}" for reason, n in sorted(found.excluded.items())) or "0"
        row = [name, found.version, "yes" if found.ok else "NO", found.calls, found.sampled, found.trained]
        row += [excluded, found.unexplained, found.compactions, found.subagents]
        table.add_row(*map(str, row), f"{found.split:.0%}", f"{found.duration_s:.1f}")
    console.print(table)
    for name, found in findings.items():
        for failure in found.failures:
            console.print(f"{name}: {failure}", markup=False, highlight=False)
        if not found.ok and found.log:
            tail = found.log[-LOG_TAIL:].decode("utf-8", "replace")
            console.print(f"{name} said last:\n{tail}", markup=False, highlight=False)
