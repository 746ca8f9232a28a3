"""The report of `insitu conformance` on a console, and the agents that its arguments name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from insitu.agents.recipe import Recipe, parse_agent, resolve_agent
from insitu.config import HarnessTable
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.conformance.checks import ConformanceResult

LOG_TAIL = 2000
WIDTH = 130
"""Width of the table if the output is not a terminal."""


def choose(agents: str, command: str, config: Path | None) -> dict[str, Recipe]:
    """Return the agents of the command line by their name in the report; all of AGENT_TOOLS if none is given.

    Raises ConfigError.
    """
    texts = [text.strip() for text in agents.split(",") if text.strip()]
    recipes = {text.replace("-", "_"): parse_agent(text) for text in texts}
    if command:
        recipes["command"] = resolve_agent(HarnessTable(command=tuple(shlex.split(command))))
    if config is not None:
        recipes[config.stem] = parse_agent(str(config))
    return recipes or {name: parse_agent(name) for name in AGENT_TOOLS}


def console_on(stream: TextIO) -> Console:
    """Return a console whose tables are as wide as a terminal, else WIDTH."""
    return Console(file=stream, width=None if stream.isatty() else WIDTH)


def print_report(findings: Mapping[str, ConformanceResult], console: Console) -> None:
    table = Table("agent", "version", "ok", box=None, pad_edge=False)
    for head in ("calls", "sampled", "trained", "excluded", "unexplained"):
        table.add_column(head, justify="right")
    for head in ("compactions", "sub-agents", "odd splits", "seconds"):
        table.add_column(head, justify="right")
    for name, found in findings.items():
        excluded = ", ".join(f"{n} {reason}" for reason, n in sorted(found.excluded.items())) or "0"
        row = [name, found.version, "yes" if found.ok else "NO", found.calls, found.sampled, found.trained]
        asked = ("-" if number is None else number for number in (found.compactions, found.subagents))
        row += [excluded, found.unexplained, *asked]
        table.add_row(*map(str, row), f"{found.split:.0%}", f"{found.duration_s:.1f}")
    console.print(table)
    if any(None in (found.compactions, found.subagents) for found in findings.values()):
        console.print("-: not asked for", highlight=False)
    for name, found in findings.items():
        for failure in (*found.failures, *found.notes):
            console.print(f"{name}: {failure}", markup=False, highlight=False)
        if not found.ok and found.log:
            tail = found.log[-LOG_TAIL:].decode("utf-8", "replace")
            console.print(f"last output of {name}:\n{tail}", markup=False, highlight=False)
