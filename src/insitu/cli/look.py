"""Commands that look at runs: `runs`, `show RUN ROLLOUT`, `query`, `compare`, `top`, `track`."""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from typing import TYPE_CHECKING

import orjson

from insitu.errors import ConfigError

if TYPE_CHECKING:
    from insitu.view.web.runs import RunHandle


def _json_line(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def runs_verb(options: argparse.Namespace) -> int:
    from insitu.view.terminal import runs_found, runs_text

    found = runs_found(options.folder)
    if options.json:
        _json_line({"runs": found})
    else:
        print("\n".join(runs_text(found)))
    return 0


def show_rollouts(options: argparse.Namespace) -> int:
    """Show one rollout, or the newest that were not solved, or that have calls which did not parse."""
    from insitu.view import rollout_text as shown
    from insitu.view.terminal import one_run

    run = one_run(options.run)
    if options.failed is not None or options.unparsed is not None:
        return _show_newest(run, options)
    found = shown.rollout_found(run, options.rollout)
    segments = [segment["segment"] for segment in found.get("segments", ())]
    tokens = shown.tokens_of(run, options.rollout, segments)
    if options.json:
        _json_line({**found, "tokens": list(tokens)} if options.tokens else found)
        return 0
    for line in shown.rollout_text(found):
        print(line)
    for line in shown.diff_text(found) if options.diff else ():
        print(line)
    for line in shown.token_lines(tokens) if options.tokens else ():
        print(line)
    return 0


def _show_newest(run: RunHandle, options: argparse.Namespace) -> int:
    from insitu.view import rollout_text as shown

    counts = [count for count in (options.failed, options.unparsed) if count is not None]
    if options.rollout or options.tokens or options.diff or min(counts) < 1:
        raise ConfigError(
            "--failed and --unparsed take a positive number and stand without ROLLOUT, --tokens, --diff"
        )
    filters = {"solved": 0} if options.failed is not None else {}
    filters |= {"unparsed": 1} if options.unparsed is not None else {}
    none = "every rollout is solved"
    if options.unparsed is not None:
        none = "no such rollout has a malformed call or one of an unknown tool"
    rows = shown.newest(run, filters, min(counts))
    if options.json:
        _json_line({"rollouts": rows})
    else:
        print("\n".join(shown.newest_text(rows, none)))
    return 0


def query_verb(options: argparse.Namespace) -> int:
    from insitu.storage.sql import SqlReader
    from insitu.view.terminal import one_run, table

    if options.limit < 1:
        raise ConfigError("--limit takes a positive number")
    with SqlReader(one_run(options.run).path) as reader:
        found = reader.select(options.sql, options.limit)
    if options.json:
        for row in found.rows:
            _json_line(dict(zip(found.columns, row, strict=True)))
    elif options.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([found.columns, *found.rows])
    else:
        rows = [[f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in found.rows]
        print("\n".join(table(found.columns, rows)))
    if found.cut:
        print(f"insitu: only the first {options.limit} rows; --limit N gives more", file=sys.stderr)
    return 0


def compare_verb(options: argparse.Namespace) -> int:
    from insitu.view.terminal import comparison, comparison_text, one_run

    found = comparison(one_run(options.a), one_run(options.b))
    if options.json:
        _json_line(found)
    else:
        print("\n".join(comparison_text(found)))
    return 0


def track_verb(options: argparse.Namespace) -> int:
    from insitu.tools import track

    for name, lines in track(options.run, to=options.to).items():
        print(f"{name}: {lines} lines sent")
    return 0


def top_verb(options: argparse.Namespace) -> int:
    """Show a run until it ends, or how it ended; Ctrl-C is a success."""
    from insitu.progress.open import open_view
    from insitu.storage.run_dir import run_state
    from insitu.view.watch import ended_text, watch

    if run_state(options.run) != "running":
        print("\n".join(ended_text(options.run)))
        return 0
    view = open_view(sys.stdout, plain=options.plain, run_dir=options.run)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            watch(options.run, view)
    finally:
        view.close()
    return 0
