"""Console view of `insitu conformance`: a table, failures and a JSON line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import orjson
from rich.console import Console
from rich.table import Table

from insitu.agents.recipe import Recipe, parse_agent, resolve_agent
from insitu.cli.console import shown_progress
from insitu.cli.report import EXIT_FAILED
from insitu.command import Arg, Json
from insitu.config import HarnessTable
from insitu.shutdown import run_interruptible
from insitu.suites.conformance.agent_tools import AGENT_TOOLS
from insitu.suites.conformance.checks import ConformanceResult
from insitu.suites.conformance.run import conform_all

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


def conformance(
    agents: Annotated[str, Arg(metavar="A,B@VERSION", help="agents (default: all)")] = "",
    own_command: Annotated[
        str,
        Arg(
            flag="--command",
            metavar="TEXT",
            help='own agent that speaks chat completions, e.g. "my-agent {prompt_file}"',
        ),
    ] = "",
    config: Annotated[Path | None, Arg(metavar="FILE", help="own agent: TOML with [harness]")] = None,
    json: Json = False,
    record: Annotated[Path | None, Arg(metavar="DIR", help="record the wire traffic here")] = None,
) -> int:
    """Exit code 0 if every agent passed. Raises ConfigError, SetupError."""
    recipes = choose(agents, own_command, config)
    shown = sys.stderr if json else sys.stdout
    with shown_progress() as view:
        findings = run_interruptible(conform_all(recipes, record, view))
    print_report(findings, Console(file=shown, width=None if shown.isatty() else WIDTH))
    if json:
        line = {"agents": {name: finding.as_json() for name, finding in findings.items()}}
        print(orjson.dumps(line).decode())
    return 0 if all(finding.ok for finding in findings.values()) else EXIT_FAILED


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
