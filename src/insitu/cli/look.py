"""Commands that look at runs: `runs`, `query`, `compare`."""

from __future__ import annotations

import argparse
import csv
import sys

import orjson

from insitu.errors import ConfigError


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
        print("\n".join(table(found.columns, found.rows)))
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
