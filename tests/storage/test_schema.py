"""Stores of the oldest schema that can be opened: read as they are, and migrated by a writer."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from helpers_record import make_rollout, same

from insitu.errors import RecordError
from insitu.storage.queries import ONE_ROW, SORTS, TURN_HEADS, VERDICT, RunReader
from insitu.storage.schema import OLDEST_VERSION, SCHEMA, SCHEMA_VERSION
from insitu.storage.store import Store
from tests.fakes.old_store import make_old

COLUMNS = {8: 112}
"""Version -> number of columns of all its tables."""


def old_store(path: Path) -> Path:
    with Store(path) as store:
        store.put_rollout("train", 1, 0, 0, make_rollout("train/00001/000/00"))
    make_old(path)
    return path


def tables_of(db: sqlite3.Connection) -> dict[str, set[str]]:
    names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in names}


def test_an_old_store_is_read_without_a_write(tmp_path: Path) -> None:
    path = old_store(tmp_path / "run.sqlite")
    before = path.read_bytes()
    with RunReader(tmp_path) as reader:
        assert same(reader.rollout("train/00001/000/00"), make_rollout("train/00001/000/00"))
        assert reader.one(ONE_ROW, id="train/00001/000/00")["calls"] == 2
        assert {turn["began_s"] for turn in reader.all(TURN_HEADS, id="train/00001/000/00")} == {None}
        assert reader.one(VERDICT, id="train/00001/000/00")["evidence"] is None
        for sort in SORTS:
            assert len(reader.page({}, sort=sort).rows) == 1
        assert reader.window("segments", "ids", 1, 0, 4)
    assert path.read_bytes() == before


def test_a_writer_migrates_an_old_store(tmp_path: Path) -> None:
    path = old_store(tmp_path / "run.sqlite")
    with Store(path) as store:
        assert store.meta()["schema_version"] == str(SCHEMA_VERSION)
        store.put_rollout("train", 1, 0, 1, make_rollout("train/00001/000/01", seed=1))
        for name, seed in (("train/00001/000/00", 0), ("train/00001/000/01", 1)):
            assert same(store.rollout(name), make_rollout(name, seed=seed))
    wanted = sqlite3.connect(":memory:")
    wanted.executescript(SCHEMA)
    migrated = sqlite3.connect(path)
    assert tables_of(migrated) == tables_of(wanted)
    wanted.close()
    migrated.close()


@pytest.mark.parametrize("version", [str(OLDEST_VERSION - 1), str(SCHEMA_VERSION + 1), "x"])
@pytest.mark.parametrize("readonly", [True, False])
def test_another_schema_is_refused(tmp_path: Path, version: str, readonly: bool) -> None:
    path = tmp_path / "run.sqlite"
    with Store(path) as store:
        store.set_meta("schema_version", version)
    with pytest.raises(
        RecordError, match=f"schema version {version}; this insitu reads 5 to {SCHEMA_VERSION}"
    ):
        Store(path, readonly=readonly)


def test_more_columns_are_a_newer_version() -> None:
    """A store with the newest number is not asked for what it lacks."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        count = sum(map(len, tables_of(db).values()))
    assert {SCHEMA_VERSION: count}.items() <= COLUMNS.items(), (
        "raise SCHEMA_VERSION, and name its columns here"
    )
