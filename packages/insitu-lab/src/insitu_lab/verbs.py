"""The verbs `attack`, `conformance` and `gpu-check`; each imports its dependencies when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from insitu.cli.console import positional, print_json, shown_progress
from insitu.cli.report import EXIT_FAILED
from insitu.command import Arg, Json


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
    from insitu.shutdown import run_interruptible
    from insitu_lab.api import attack_async
    from insitu_lab.attacks.matrix import as_markdown
    from insitu_lab.attacks.table import console_on, print_report

    if markdown:
        print(as_markdown(), end="")
        return 0
    path, changes = positional(config, overrides)
    with shown_progress() as view:
        report = run_interruptible(
            attack_async(path, overrides=changes, only=only, runner=runner, tasks=tasks, progress=view)
        )
    print_report(report, console_on(sys.stderr if json else sys.stdout))
    if json:
        print_json(report.as_json())
    return EXIT_FAILED if report.failures else 0


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
    from insitu.shutdown import run_interruptible
    from insitu_lab.conformance.run import conform_all
    from insitu_lab.conformance.table import choose, console_on, print_report

    recipes = choose(agents, own_command, config)
    with shown_progress() as view:
        findings = run_interruptible(conform_all(recipes, record, view))
    print_report(findings, console_on(sys.stderr if json else sys.stdout))
    if json:
        print_json({"agents": {name: finding.as_json() for name, finding in findings.items()}})
    return 0 if all(finding.ok for finding in findings.values()) else EXIT_FAILED


def gpu_check(
    slices: Annotated[
        Sequence[str], Arg(positional=True, metavar="SLICE", help="default: all, see --list")
    ] = (),
    listed: Annotated[bool, Arg(flag="--list", help="list the slices")] = False,
    out: Annotated[Path, Arg(metavar="DIR", help="for the reports")] = Path("gpu-check"),
    deadline: Annotated[float, Arg(metavar="S", help="begin nothing after S seconds (540)")] = 540.0,
    rehearse: Annotated[bool, Arg(help="toy sizes on the CPU")] = False,
    json: Json = False,
) -> int:
    """Run the checks; exit code 1 when one failed."""
    from insitu_lab.gpu.run import GpuCheckOptions, check_gpu
    from insitu_lab.gpu.slices import SLICES

    if listed:
        print("\n".join(f"{one.name:8}  {one.text}" for one in SLICES))
        return 0
    found = check_gpu(
        GpuCheckOptions(out=out, slices=slices, deadline_s=deadline, rehearse=rehearse),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    if json:
        print_json(found)
    else:
        words = {True: "ok", False: "FAILED", None: "not run"}
        for name, one in found["slices"].items():
            skipped = f", {one['skipped']} skipped" if one["skipped"] else ""
            print(f"{name:8}  {words[one['ok']]}{skipped}  {one['seconds']} s")
        print(f"reports in {out}")
    return EXIT_FAILED if any(one["ok"] is False for one in found["slices"].values()) else 0
