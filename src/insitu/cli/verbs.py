"""Verbs of the core; each imports its dependencies when it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from insitu.cli.console import (
    DryRun,
    Resume,
    SummaryJson,
    dry_run,
    positional,
    print_json,
    run_to_end,
    shown_progress,
)
from insitu.cli.report import EXIT_FAILED, process_began
from insitu.command import Arg, Overrides, Plain, RunPath
from insitu.errors import ConfigError


def rollout(
    config: Annotated[
        str | None, Arg(positional=True, metavar="CONFIG", help="TOML file, e.g. examples/rollout.toml")
    ] = None,
    plain: Plain = False,
    json: SummaryJson = False,
    resume: Resume = None,
    dry: DryRun = False,
    overrides: Overrides = (),
) -> int:
    from insitu.api import resolve
    from insitu.evaluate.resume import CHANGEABLE
    from insitu.evaluate.run import RolloutOptions, collect_rollouts

    path, changes = positional(config, overrides)
    if resume and path:
        raise ConfigError(f"a resumed run keeps its configuration; drop {path}")
    if not (resume or path or changes):
        raise ConfigError("give a configuration file, for instance examples/rollout.toml, or --resume DIR")
    resolved = resolve(path, changes, resume, {}, changeable=CHANGEABLE, named=False)
    if dry:
        return dry_run(resolved, lambda config: (), trains=False, samples=True)
    options = RolloutOptions(resume=resume, began=process_began())
    return run_to_end(
        "rollout",
        resolved,
        lambda config, view: collect_rollouts(config, view, options),
        plain=plain,
        json=json,
        failed=lambda summary: not summary["graded"],
    )


def serve(
    config: Annotated[
        str | None, Arg(positional=True, metavar="CONFIG", help="TOML file (default: the warm start)")
    ] = None,
    agent: Annotated[
        Sequence[str], Arg(metavar="NAME", help="print the setup of this agent (default: write all to files)")
    ] = (),
    sessions: Annotated[int, Arg(metavar="N", help="sessions to open (default: 1)")] = 1,
    tools: Annotated[Path | None, Arg(metavar="FILE", help="host tools of every session, as JSON")] = None,
    admin: Annotated[bool, Arg(help="also serve the admin API, on a separate port")] = False,
    json: Annotated[bool, Arg(help="one JSON object per line")] = False,
    overrides: Overrides = (),
) -> int:
    """Serve until Ctrl-C, which is a success."""
    from insitu.config import load_config
    from insitu.runtime.gateway import read_tools
    from insitu.serving.run import BASE
    from insitu.serving.run import serve as serve_sessions
    from insitu.shutdown import run_interruptible
    from insitu.storage.run_dir import name_run

    path, changes = positional(config, overrides)
    if not 0 < sessions <= 64:
        raise ConfigError("--sessions takes 1 to 64")
    resolved = name_run(load_config(Path(path) if path else None, changes, BASE))
    given = read_tools(tools) if tools else ()
    serving = serve_sessions(
        resolved, sys.stdout, sessions=sessions, agents=agent, admin=admin, json=json, tools=given
    )
    with contextlib.suppress(KeyboardInterrupt):
        run_interruptible(serving)
    return 0


def recover(run: Annotated[Path, Arg(positional=True, metavar="RUN", help="its run directory")]) -> int:
    from insitu.tools import recover as recover_run

    found = recover_run(run)
    if not found:
        raise ConfigError(f"{run} holds no log of an unsealed session")
    for rollout in found:
        ledger = rollout.trajectory.ledger
        kept = f"sampled {ledger.captured}, trainable {ledger.trained}"
        print(f"{rollout.id}: {len(rollout.turns)} turns, {kept}; {rollout.error}")
    return 0


def grade(
    run: RunPath,
    write: Annotated[bool, Arg(help="store new verdicts of rollouts that were not trained on")] = False,
    json: Annotated[bool, Arg(help="print the differences and the counts as JSON on stdout")] = False,
) -> int:
    from insitu.evaluate.regrade import regrade_run, report
    from insitu.shutdown import run_interruptible

    with shown_progress() as view:
        found = run_interruptible(regrade_run(run, view, write=write))
    print(report(found), end="", file=sys.stderr if json else sys.stdout)
    if json:
        print_json({"compared": found.compared()})
        print_json(found.as_json())
    return EXIT_FAILED if found.differences else 0


def install(
    agents: Annotated[
        Sequence[str],
        Arg(
            positional=True,
            required=True,
            metavar="AGENT",
            help="NAME, NAME@VERSION or TOML file with [harness]",
        ),
    ],
) -> int:
    from insitu.shutdown import run_interruptible
    from insitu.tools import install_async

    with shown_progress() as view:
        folders = run_interruptible(install_async(agents, progress=view))
    for name, folder in folders.items():
        print(f"{name}: {folder or 'no packages to install'}")
    return 0


def doctor(
    fleet: Annotated[
        str,
        Arg(
            metavar="CONFIG",
            help="check the nodes of [fleet] in this file instead: each starts an agent in a sandbox",
        ),
    ] = "",
    json: Annotated[bool, Arg(help="print the checks as one JSON object")] = False,
) -> int:
    from dataclasses import asdict

    from insitu.doctor import report
    from insitu.tools import check_machine, check_nodes

    checks = check_nodes(fleet) if fleet else check_machine()
    text, complete = report(checks)
    if json:
        print_json({"complete": complete, "checks": [asdict(check) for check in checks]})
    else:
        print(text)
    return 0 if complete else EXIT_FAILED
