"""`insitu import DIR`: a run directory from exported rollouts, for `insitu sft`, `replay` and `view`.

Files are compared with the manifest before anything is read. The new store holds the rollouts, their places,
states and failed attempts, and the committed steps whose rollouts are all there; its ledger must balance.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from insitu.config import load_config
from insitu.errors import RecordError, boundary
from insitu.storage.files import sha256_of
from insitu.storage.rollout_rows import dumps, insert, write_rollout
from insitu.storage.run_dir import TOKENIZER, RunDir, name_run, restore_steps
from insitu.storage.store import StepRecord, Store
from insitu.types import Rollout
from insitu.types.codec import read
from insitu_bridges.jsonl import read_jsonl
from insitu_bridges.parquet import read_parquet
from insitu_bridges.records import SCHEMA, ReadRollout, read_rollout

MANIFEST = "manifest.json"
_FACTS = {"schema_version": int, "form": str, "files": dict, "meta": dict, "steps": list}
_READERS = {"jsonl": read_jsonl, "parquet": read_parquet, "hf": read_parquet}
PLACE = ("rowid", "ulid", "phase", "step", "group_no", "slot")
STATE = ("state", "reason", "attempt", "version", "oldest", "account")
ATTEMPT = ("attempt", "status", "error", "timings", "ledger", "egress", "began_s", "ended_s")
"""Columns that are taken. Others are dropped: names of columns must not come from a file."""


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """Return the manifest of an export, its files verified. Raises RecordError in one line."""
    path = folder / MANIFEST
    with boundary(RecordError, f"{folder} is not an export of insitu"):
        manifest = orjson.loads(path.read_bytes())
    if not isinstance(manifest, dict) or manifest.get("format") != "insitu-rollouts":
        raise RecordError(f"{path} is not the manifest of exported rollouts")
    for name, kind in _FACTS.items():
        if not isinstance(manifest.get(name), kind):
            raise RecordError(f"{path} has no {name}")
    if manifest["schema_version"] != SCHEMA or manifest["form"] not in _READERS:
        raise RecordError(
            f"{folder} has form {manifest['form']}, schema {manifest['schema_version']}; this insitu imports"
            f" {', '.join(_READERS)} with schema {SCHEMA}"
        )
    for name, facts in manifest["files"].items():
        file = folder / name
        with boundary(RecordError, f"read {file}"):
            found = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        if found != facts:
            raise RecordError(f"{file} differs from the manifest: the export is damaged or was changed")
    return manifest


def read_export(folder: Path) -> Iterator[ReadRollout]:
    """Yield the rollouts of an export in its order. Raises RecordError."""
    reader = _READERS[read_manifest(folder)["form"]]
    for record, rows in reader(folder):
        yield read_rollout(record, rows)


def import_folder(folder: Path, out: Path | None = None, overrides: Sequence[str] = ()) -> Path:
    """Make a run directory from an export and return it (default: a new one in runs/).

    `overrides` are "table.key=value": an export names models and files without their folders. Raises
    InsituError.
    """
    manifest = read_manifest(folder)
    config = load_config(folder / "config.toml", overrides, stored=True)
    config = name_run(config.model_copy(update={"run": config.run.changed(dir=str(out or ""))}))
    known = Path(config.run.dir).exists()
    with RunDir.create(config) as made:
        try:
            _fill(made, folder, manifest)
        except BaseException:
            if not known:
                shutil.rmtree(made.path, ignore_errors=True)
            raise
        return made.path


def _fill(made: RunDir, folder: Path, manifest: Mapping[str, Any]) -> None:
    if (folder / TOKENIZER).is_dir():
        shutil.copytree(folder / TOKENIZER, made.path / TOKENIZER, dirs_exist_ok=True)
    with ImportedStore(made.path / "run.sqlite") as store, made.metrics() as metrics:
        for found in read_export(folder):
            try:
                store.add(found.rollout, found.place, found.state, found.attempts)
            except (TypeError, ValueError, AttributeError) as error:
                raise RecordError(f"rollout {found.rollout.id} cannot be stored: {error!r}") from error
        for name, value in manifest["meta"].items():
            if name != "schema_version":
                store.set_meta(name, value)
        for step in manifest["steps"]:
            store.add_step(_step(step))
        store.check_balance()
        restore_steps(made, store, metrics)


def _step(values: Mapping[str, Any]) -> StepRecord:
    with boundary(RecordError, "a committed step of the export cannot be read"):
        record: StepRecord = read(StepRecord, values)
    return record


def _picked(rollout_id: str, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    lacking = [name for name in names if name not in values]
    if lacking:
        raise RecordError(f"rollout {rollout_id} has no {lacking[0]}")
    return {name: values[name] for name in names}


class ImportedStore(Store):
    """A store that is written once, rollout by rollout; `check_balance` verifies the whole."""

    def add(
        self,
        rollout: Rollout,
        place: Mapping[str, Any],
        state: Mapping[str, Any],
        attempts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a rollout with its state and its failed attempts. Raises RecordError when it is there."""
        place, state = _picked(rollout.id, place, PLACE), _picked(rollout.id, state, STATE)
        failed = [_picked(rollout.id, attempt, ATTEMPT) for attempt in attempts]
        with self._writing("graded") as db:
            key = {"rollout_id": rollout.id}
            if db.execute("SELECT 1 FROM rollouts WHERE rollout_id = :rollout_id", key).fetchone():
                raise RecordError(f"rollout {rollout.id} is there twice")
            write_rollout(db, place, rollout)
            at = {name: place[name] for name in ("phase", "step", "group_no", "slot")}
            insert(db, "states", key | at | {"task_id": rollout.task_id} | state)
            for attempt in failed:
                texts = {name: dumps(attempt[name]) for name in ("timings", "ledger")}
                insert(db, "attempts", {**key, **attempt, **texts})

    def add_step(self, record: StepRecord) -> None:
        """Store a committed step."""
        with self._writing("step") as db:
            names = ("step", "checkpoint", "plan_hash", "committed_s")
            values: dict[str, object] = {name: getattr(record, name) for name in names}
            insert(db, "steps", values | {"metrics": dumps(dict(record.metrics))})
            ledger = record.ledger
            entries = {"captured": ledger.captured, "trained": ledger.trained, **ledger.excluded}
            for entry, tokens in entries.items():
                insert(db, "ledger", {"step": record.step, "entry": entry, "tokens": tokens})
