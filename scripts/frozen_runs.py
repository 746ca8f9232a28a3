"""Stored runs and what is exported of them: a part of scripts/frozen."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import re
import sqlite3
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FORMS = "jsonl parquet hf atif otlp dpo openenv prime sft skyrl tinker verifiers verl".split()
ULID = re.compile(r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b")
"""An id with the time in it."""


@functools.cache
def written_run(work: Path) -> Path:
    """Return a run that today's code writes, the same each time, with odd text wherever text is free."""
    (lab,) = (ROOT / "tests").rglob("run_lab.py")
    sys.path.append(str(lab.parent))
    run, module = work / "written" / "frozen", importlib.import_module("run_lab")
    module.make_rollout, module._evaluate = with_rare_values(module.make_rollout, module._evaluate)
    module.make_run(run, hostile=True, steps=2, agents={"first": "script", "second": "script"})
    config = run / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(run), "frozen"), encoding="utf-8")
    return run


def with_rare_values(make: Callable[..., Any], evaluate: Callable[..., None]) -> tuple[Any, Any]:
    """Return the two so that every field of a rollout, a turn and a row has a value somewhere."""
    made: list[Any] = []

    def rare(*arguments: Any) -> Any:
        rollout, slot = make(*arguments), len(made) % 4
        path, evaluation = rollout.trajectory, rollout.id.startswith("eval")
        turns, rows = list(path.turns), list(path.segments)
        why = "edited" if slot == 1 else "demonstrated" if slot == 2 and evaluation else ""
        if why:  # the row of the last turn is no longer trained
            tokens, ledger = int(rows[2].mask.sum()), path.ledger
            ledger = replace(ledger, trained=ledger.trained - tokens, excluded={why: tokens})
            path = replace(path, ledger=ledger)
        if why == "edited":
            turns[3] = replace(turns[3], excluded=why, spans=(), times=replace(turns[3].times, cached=None))
            known = [np.arange(6 * len(row.ids), dtype=np.int16) % 5 for row in rows[:2]]
            rows = [replace(row, experts=e.reshape(-1, 3, 2)) for row, e in zip(rows[:2], known, strict=True)]
        elif why:
            turns[3] = replace(turns[3], logprobs=None)
            rows[2] = replace(rows[2], kind=why, logprobs=0 * rows[2].logprobs)
        elif slot == 0:
            runs = ((0, turns[2].version_runs[0][1]), (1, 7))
            turns[2] = replace(turns[2], version_runs=runs, finish="length", advisory=(("top_k", "7"),))
        notes = tuple(replace(note, kind="fork", token=3, tokens=5) for note in path.drifts)
        path = replace(
            path, turns=tuple(turns), segments=tuple(rows), drifts=path.drifts + notes * (slot == 3)
        )
        made.append(replace(rollout, trajectory=path, egress_attempts=None if slot == 3 else slot))
        return made[-1]

    def with_attempts(store: Any, *arguments: Any) -> None:
        evaluate(store, *arguments)
        tried = made[-1]
        failed = {
            "status": type(tried.status)("infra_failed"),
            "reward": None,
            "verdict": None,
            "error": "no host",
        }
        store.put_attempt(replace(tried, attempt=0, **failed))

    return rare, with_attempts


def exports(archive: Path, work: Path) -> tuple[Any, Any]:
    """Return digests of the columns of every form: of the run in the archive, and of one written now.

    The archive is made where there is none.
    """
    new = written_run(work)
    if not archive.exists():
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(new, "frozen", filter=lambda item: None if item.name.endswith("/lock") else item)
    with tarfile.open(archive) as tar:
        tar.extractall(work / "stored", filter="data")
    stored, written = (
        {form: export_columns(run, form) for form in FORMS} for run in (work / "stored" / "frozen", new)
    )
    return stored, written


def export_columns(run: Path, form: str) -> Any:
    out = run.parent / form
    report = importlib.import_module("insitu").export_run(run, out, to=form)
    found = {name: report[name] for name in ("rollouts", "rows", "tokens", "account", "lost")}
    columns: dict[str, Any] = {}
    for path in sorted((out / "data").rglob("*")):
        if path.is_file():
            kind = re.sub(r"\d+", "N", path.name)
            for row in rows_of(path):
                for name, value in row.items():
                    text = ULID.sub("ULID", json.dumps(value, default=repr, sort_keys=True))
                    columns.setdefault(f"{kind} {name}", hashlib.sha256()).update(f"{text}\n".encode())
    digests = {name: digest.hexdigest()[:12] for name, digest in columns.items()}
    return json.loads(json.dumps({**found, "columns": digests}))


def rows_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a file; rows without names get their numbers."""
    if path.suffix == ".parquet":
        items = importlib.import_module("pyarrow.parquet").read_table(path).to_pylist()
    elif path.suffix == ".bin":
        items = importlib.import_module("msgpack").unpackb(path.read_bytes())
    elif path.suffix == ".jsonl":
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        items = [json.loads(path.read_text(encoding="utf-8"))]
    for item in items:
        if isinstance(item, dict):
            yield item
        elif all(isinstance(part, dict) for part in item):
            yield from item
        else:
            yield {str(number): part for number, part in enumerate(item)}


def tables(run: Path) -> Any:
    """Return the columns and constraints of each table and index of a run's store."""
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as db:
        made = db.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        ).fetchall()
    found = {}
    for name, sql in made:
        head, _, rest = " ".join(sql.split()).partition("(")
        body, _, tail = rest.rpartition(")")
        found[name] = [f"{head.strip()} (...){tail}", *re.split(r",\s*(?![^()]*\))", body.strip())]
    return found
