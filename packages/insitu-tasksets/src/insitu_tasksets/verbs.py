"""The verb `insitu tasks`; it imports its dependencies when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from insitu.cli.console import positional
from insitu.command import Arg, Overrides


def tasks(
    what: Annotated[
        str, Arg(positional=True, choices=("list", "show", "validate", "export", "judge"), help="what to do")
    ],
    config: Annotated[
        str | None, Arg(positional=True, metavar="CONFIG", help="TOML file (default: overrides only)")
    ] = None,
    ids: Annotated[Sequence[str], Arg(flag="--id", metavar="ID", help="only this task (repeatable)")] = (),
    name: Annotated[
        str, Arg(flag="--set", metavar="NAME", help="only this of [[tasks]] (default: all)")
    ] = "",
    limit: Annotated[int, Arg(metavar="N", help="the first N tasks of each set only")] = 0,
    repeats: Annotated[int, Arg(metavar="N", help="validate: runs of each task")] = 3,
    out: Annotated[
        Path | None, Arg(metavar="FILE", help="validate: its result; export: JSONL file (default: stdout)")
    ] = None,
    json: Annotated[bool, Arg(help="print JSON, last on stdout")] = False,
    tests: Annotated[bool, Arg(help="show: also print the tests")] = False,
    labels: Annotated[
        Path | None,
        Arg(metavar="FILE", help="judge: labelled rows, JSONL; compares reward.function with them"),
    ] = None,
    overrides: Overrides = (),
) -> int:
    from insitu.config import load_config
    from insitu_tasksets.tasks_view import Options, run

    path, changes = positional(config, overrides)
    options = Options(
        set=name, ids=ids, limit=limit, repeats=repeats, out=out, json=json, tests=tests, labels=labels
    )
    return run(load_config(Path(path) if path else None, changes), what, options)
