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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMS = "jsonl parquet hf atif otlp openenv prime skyrl tinker verifiers verl".split()
ULID = re.compile(r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b")
"""An id with the time in it."""


@functools.cache
def written_run(work: Path) -> Path:
    """Return a run that today's code writes, the same each time, with odd text wherever text is free."""
    (lab,) = (ROOT / "tests").rglob("run_lab.py")
    sys.path.append(str(lab.parent))
    run = work / "written" / "frozen"
    importlib.import_module("run_lab").make_run(
        run, hostile=True, steps=2, agents={"first": "script", "second": "script"}
    )
    config = run / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(run), "frozen"), encoding="utf-8")
    return run


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
