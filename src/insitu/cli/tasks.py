"""Console view of `insitu tasks list | show | validate | export`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from insitu.api import check_at_hand
from insitu.config import Config, load_config
from insitu.errors import ConfigError, boundary
from insitu.progress.open import open_view
from insitu.shutdown import run_interruptible
from insitu.tools import ValidateOptions, export_tasks, list_tasks, show_task, validate_with


def run(options: argparse.Namespace) -> int:
    """Exit code: 0, or 1 when a task did not pass its validation; `list` raises what a run is refused for."""
    overrides, path = list(options.overrides), options.config
    if path is not None and "=" in path and not Path(path).exists():
        overrides.insert(0, path)
        path = None
    config = load_config(Path(path) if path else None, overrides)
    if options.set:
        if options.set not in (names := [table.name for table in config.tasks]):
            raise ConfigError(f"no task set {options.set!r}; there are: {', '.join(filter(None, names))}")
        config = config.of_set(config.tasks[names.index(options.set)])
    if options.repeats < 1 or options.limit < 0:
        raise ConfigError("--repeats and --limit take positive numbers")
    if options.what == "validate":
        return _validate(config, options)
    if options.what == "show":
        for name in options.id or [_first(config)]:
            _show(config, name, options.json, tests=options.tests)
        return 0
    if options.what == "export":
        return _export(config, options)
    _list(config, options)
    check_at_hand(config, trains=False)
    return 0


def _validate(config: Config, options: argparse.Namespace) -> int:
    chosen = ValidateOptions(
        repeats=options.repeats, allowlist=options.out, limit=options.limit, ids=options.id
    )
    view = open_view(sys.stderr)
    try:
        summary = run_interruptible(validate_with(config, chosen, view))
    finally:
        view.close()
    if options.json:
        print(json.dumps(summary))
    else:
        for name, found in (summary["sets"] or {"": summary}).items():
            print(
                f"{f'{name}: ' if name else ''}{found['passed']} of {found['tasks']} tasks passed,"
                f" {found['failed']} failed, {found['no_gold']} without a solution,"
                f" {found['infra']} not judged, {found['refused_rows']} rows refused"
                f"{found['gate'] and '; kept in ' + found['gate']}"
            )
    return 0 if summary["passed"] == summary["tasks"] else 1


def _export(config: Config, options: argparse.Namespace) -> int:
    """Write the tasks as JSONL to --out, else to stdout."""
    if config.set_names:
        raise ConfigError(f"export writes one task set: choose one of {', '.join(config.set_names)} by --set")
    lines = list(export_tasks(config, limit=options.limit, ids=options.id))
    if options.out is None:
        sys.stdout.buffer.writelines(lines)
    else:
        with boundary(ConfigError, f"write {options.out}"):
            options.out.write_bytes(b"".join(lines))
        print(f"{len(lines)} tasks written to {options.out}", file=sys.stderr)
    return 0


def _first(config: Config) -> str:
    rows, _ = list_tasks(config, limit=1)
    return str(rows[0]["id"])


def _show(config: Config, task_id: str, as_json: bool, *, tests: bool) -> None:
    shown = show_task(task_id, config, tests=tests)
    if as_json:
        print(json.dumps(shown))
        return
    for key, value in shown.items():
        if key not in ("prompt", "files", "required") and (key != "task_set" or value):
            print(f"{key:10} {value}")
    for path, size in shown["files"].items():
        print(f"{'file':10} {path} ({size} bytes)")
    for line in shown.get("required", ()):
        print(f"{'required':10} {line}")
    print(f"\n{shown['prompt']}")


def _list(config: Config, options: argparse.Namespace) -> None:
    rows, total = list_tasks(config, limit=options.limit)
    if options.json:
        print(json.dumps({**total, "rows": rows}))
        return
    width = max((len(str(row["id"])) for row in rows), default=2)
    sets = max((len(row["task_set"]) + 2 for row in rows if row["task_set"]), default=0)
    for row in rows:
        gold = "gold" if row["gold"] else "-"
        judged = f"{row['runner']:12} {row['trust']:8} {row['tests']:5} tests"
        print(f"{row['task_set']:{sets}}{row['id']:{width}}  {judged}  {gold:4}  {row['image']}".rstrip())
    split = f" ({total['train']} train, {total['eval']} eval)" if "train" in total else ""
    print(f"{total['tasks']} tasks{split}, {len(total['refused'])} rows refused")
    for refusal in total["refused"]:
        print(f"refused: {refusal}", file=sys.stderr)
