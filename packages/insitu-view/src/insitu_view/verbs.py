"""The verbs that look at runs; each imports its dependencies when it runs."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson

from insitu.cli.console import print_json, shown_progress
from insitu.command import Arg, Plain, RunPath
from insitu.errors import ConfigError

if TYPE_CHECKING:
    from insitu_view.web.runs import RunHandle


def _json_line(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())


OneObject = Annotated[bool, Arg(help="print one JSON object")]


def runs(
    folder: Annotated[Path, Arg(positional=True, metavar="DIR")] = Path("runs"), json: OneObject = False
) -> int:
    from insitu_view.terminal import runs_found, runs_text

    found = runs_found(folder)
    if json:
        _json_line({"runs": found})
    else:
        print("\n".join(runs_text(found)))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What `insitu show` shows of the rollouts of a run."""

    run: Path
    rollout: str
    failed: int | None
    unparsed: int | None
    diff: bool
    tokens: bool
    json: bool


def show(
    run: RunPath,
    rollout: Annotated[str, Arg(positional=True, metavar="ROLLOUT", help="id, as train/00001/000/00")] = "",
    failed: Annotated[int | None, Arg(metavar="N", help="newest N (most: 200) not solved")] = None,
    unparsed: Annotated[int | None, Arg(metavar="N", help="newest N with malformed or unknown calls")] = None,
    diff: Annotated[bool, Arg(help="also the diff of the rollout")] = False,
    tokens: Annotated[bool, Arg(help="also every token of the rollout with its fate")] = False,
    json: Annotated[bool, Arg(help="print summary.json, or the rollout as JSON")] = False,
) -> int:
    from insitu.results.run import Run
    from insitu_train.run_report import show_run

    if rollout or failed is not None or unparsed is not None:
        return _show_rollouts(
            _Shown(
                run=run,
                rollout=rollout,
                failed=failed,
                unparsed=unparsed,
                diff=diff,
                tokens=tokens,
                json=json,
            )
        )
    if tokens or diff:
        raise ConfigError("--tokens and --diff are of one rollout: give its id, as in train/00001/000/00")
    if not json:
        print(show_run(run), end="")
        return 0
    summary = Run(run).summary
    if summary is None:
        raise ConfigError(f"{run} has no summary.json: the run is not finished")
    print_json(summary)
    return 0


def _show_rollouts(options: _Shown) -> int:
    """Show one rollout, or the newest that were not solved, or that have calls which did not parse."""
    from insitu_view import rollout_text as shown
    from insitu_view.web.runs import one_run

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


def _show_newest(run: RunHandle, options: _Shown) -> int:
    from insitu_view import rollout_text as shown

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


def query(
    run: RunPath,
    sql: Annotated[
        str,
        Arg(
            positional=True,
            metavar="SQL",
            help="one SELECT; views: v_rollouts, v_turns, v_steps, v_attempts",
        ),
    ],
    limit: Annotated[int, Arg(metavar="N", help="most rows (default: 1000)")] = 1000,
    json: Annotated[bool, Arg(instead_of="form", help="one JSON object per row")] = False,
    as_csv: Annotated[bool, Arg(flag="--csv", instead_of="form", help="CSV with a header")] = False,
) -> int:
    from insitu_view.sql import SqlReader
    from insitu_view.terminal import table
    from insitu_view.web.runs import one_run

    if limit < 1:
        raise ConfigError("--limit takes a positive number")
    with SqlReader(one_run(run).path) as reader:
        found = reader.select(sql, limit)
    if json:
        for row in found.rows:
            _json_line(dict(zip(found.columns, row, strict=True)))
    elif as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([found.columns, *found.rows])
    else:
        rows = [[f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in found.rows]
        print("\n".join(table(found.columns, rows)))
    if found.cut:
        print(f"insitu: only the first {limit} rows; --limit N gives more", file=sys.stderr)
    return 0


def compare(
    a: Annotated[Path, Arg(positional=True, metavar="A", help="run directory")],
    b: Annotated[Path, Arg(positional=True, metavar="B", help="run directory")],
    json: OneObject = False,
) -> int:
    from insitu_view.terminal import comparison, comparison_text
    from insitu_view.web.runs import one_run

    found = comparison(one_run(a), one_run(b))
    if json:
        _json_line(found)
    else:
        print("\n".join(comparison_text(found)))
    return 0


def digest(
    run: RunPath,
    tokens: Annotated[int, Arg(metavar="N", help="most tokens, of 3 bytes each (default: 4000)")] = 4000,
    json: OneObject = False,
) -> int:
    from insitu_view.digest import as_json
    from insitu_view.digest import digest as digest_of
    from insitu_view.web.runs import one_run

    handle = one_run(run)
    found = digest_of(handle, tokens)
    if json:
        _json_line(as_json(handle, found))
    else:
        print(found.text(), end="")
    return 0


def skills(
    agents: Annotated[
        Sequence[str],
        Arg(flag="--for", metavar="AGENT", help="coding agent; repeatable (default: all known)"),
    ] = (),
    folder: Annotated[
        Path, Arg(positional=True, metavar="DIR", help="project that the agent works in (default: here)")
    ] = Path(),
    force: Annotated[bool, Arg(help="replace skills that were changed")] = False,
    json: OneObject = False,
) -> int:
    from insitu_view.skills import write_skills

    written = write_skills(folder, agents, force=force)
    if json:
        _json_line({"written": [str(path) for path in written]})
    else:
        print("\n".join(map(str, written)))
    return 0


def top(run: RunPath, plain: Plain = False) -> int:
    """Show a run until it ends, or how it ended; Ctrl-C is a success."""
    from insitu.storage.run_dir import run_state
    from insitu_view.watch import ended_text, watch

    if run_state(run) != "running":
        print("\n".join(ended_text(run)))
        return 0
    with shown_progress(plain=plain, json=False, run_dir=run) as view, contextlib.suppress(KeyboardInterrupt):
        watch(run, view)
    return 0


def view(
    runs: Annotated[
        Sequence[Path],
        Arg(positional=True, metavar="RUN", help="run directories, or folders of them (default: runs)"),
    ] = (),
    port: Annotated[int | None, Arg(help="port (default: 7430, or the next free one)")] = None,
    host: Annotated[str, Arg(help="address to listen on (default: 127.0.0.1)")] = "127.0.0.1",
    allow_network: Annotated[bool, Arg(help="permit a --host that other machines can reach")] = False,
    at: Annotated[str, Arg(metavar="PLACE", help="page to open, as the key y copies it")] = "",
    export: Annotated[
        Path | None, Arg(metavar="FILE", help="write the runs as one HTML file instead")
    ] = None,
    rollouts: Annotated[
        str,
        Arg(
            metavar="N|ID,…|all",
            help="rollouts that the file holds whole: the newest N, ids, or all (default: the telling ones,"
            " and pairs before and after training)",
        ),
    ] = "",
    redact: Annotated[
        Sequence[str], Arg(metavar="REGEX", help="replace this in the file too; may be repeated")
    ] = (),
    no_tokens: Annotated[bool, Arg(help="leave tokens out of the file")] = False,
    with_checks: Annotated[bool, Arg(help="keep failing checks: they show hidden tests")] = False,
    max_mib: Annotated[int, Arg(help="largest size of the file (default: 25)")] = 25,
    no_open: Annotated[bool, Arg(help="open no browser")] = False,
    json: Annotated[bool, Arg(help='print {"url": ..., "token": ...}')] = False,
) -> int:
    """Serve the viewer until Ctrl-C, which is a success, or write one run as one file."""
    from insitu.shutdown import run_interruptible
    from insitu_view.web.command import DEFAULT_FOLDER
    from insitu_view.web.command import view as serve_view
    from insitu_view.web.export import export as export_runs

    if export is not None:
        export_runs(
            runs or [DEFAULT_FOLDER],
            export,
            sys.stdout,
            rollouts=rollouts,
            redact=redact,
            tokens=not no_tokens,
            checks=with_checks,
            max_mib=max_mib,
        )
        return 0
    serving = serve_view(
        runs,
        sys.stdout,
        host=host,
        port=port,
        allow_network=allow_network,
        opens=not no_open,
        json=json,
        at=at,
    )
    with contextlib.suppress(KeyboardInterrupt):
        run_interruptible(serving)
    return 0


def track(
    run: RunPath,
    to: Annotated[Sequence[str], Arg(metavar="NAME", help="tracker; repeatable (default: track.to)")] = (),
) -> int:
    from insitu_view.tracking.start import track as track_run

    for name, lines in track_run(run, to=to).items():
        print(f"{name}: {lines} lines sent")
    return 0
