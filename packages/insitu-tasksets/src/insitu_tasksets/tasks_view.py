"""Console view of `insitu tasks list | show | validate | export | judge`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from insitu.cli.console import shown_progress
from insitu.config import Config
from insitu.errors import ConfigError, boundary
from insitu.registry import find
from insitu.runtime.preflight import check_at_hand
from insitu.shutdown import run_interruptible
from insitu_tasksets.api import export_tasks, list_tasks, show_task
from insitu_tasksets.judges import Ranking, Rubric, agreement
from insitu_tasksets.validate import ValidateOptions, validate_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of the verb but for what it does and with which configuration."""

    set: str
    ids: Sequence[str]
    limit: int
    repeats: int
    out: Path | None
    json: bool
    tests: bool
    labels: Path | None = None


def run(config: Config, what: str, options: Options) -> int:
    """Exit code: 0, or 1 when a task did not pass its validation; `list` raises what a run is refused for."""
    if options.set:
        if options.set not in (names := [table.name for table in config.tasks]):
            raise ConfigError(f"no task set {options.set!r}; there are: {', '.join(filter(None, names))}")
        config = config.arms[options.set].config
    if options.repeats < 1 or options.limit < 0:
        raise ConfigError("--repeats and --limit take positive numbers")
    if what == "validate":
        return _validate(config, options)
    if what == "show":
        for task in options.ids or [_first(config)]:
            _show(config, task, options.json, tests=options.tests)
        return 0
    if what == "export":
        return _export(config, options)
    if what == "judge":
        return _judge(config, options)
    _list(config, options)
    check_at_hand(config, trains=False)
    return 0


def _validate(config: Config, options: Options) -> int:
    chosen = ValidateOptions(
        repeats=options.repeats, limit=options.limit, ids=options.ids, allowlist=options.out
    )
    with shown_progress() as view:
        summary = run_interruptible(validate_tasks(config, chosen, view))
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


def _judge(config: Config, options: Options) -> int:
    """Print how far the judge of `reward.function` agrees with labels; 1 where a row got no verdict."""
    judge = find("rewards", config.reward.function) if config.reward.function else None
    if not isinstance(judge, Rubric | Ranking):
        raise ConfigError("judge needs reward.function to be a Rubric or a Ranking (insitu_tasksets.judges)")
    if options.labels is None:
        raise ConfigError("judge needs --labels FILE, a JSONL file of labelled rows")
    with boundary(ConfigError, f"cannot read {options.labels}"):
        rows = [json.loads(line) for line in options.labels.read_text().splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{options.labels}: each line must be a JSON object")
    found = run_interruptible(agreement(judge, rows[: options.limit or None]))
    if options.json:
        print(json.dumps(asdict(found)))
        return 1 if found.failed else 0
    print(f"{found.count} rows: accuracy {found.accuracy:.3f}, kappa {found.kappa:.3f}")
    for name in found.disagree:
        print(f"  disagrees: {name}")
    for line in found.failed:
        print(f"  no verdict: {line}")
    return 1 if found.failed else 0


def _export(config: Config, options: Options) -> int:
    """Write the tasks as JSONL to --out, else to stdout."""
    if config.set_names:
        raise ConfigError(f"export writes one task set: choose one of {', '.join(config.set_names)} by --set")
    lines = list(export_tasks(config, limit=options.limit, ids=options.ids))
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


def _list(config: Config, options: Options) -> None:
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
