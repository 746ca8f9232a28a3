"""Tables of a run's store, and how a store of an earlier version is brought to them.

A new version only adds tables, indexes and columns that may be NULL. So one comparison of the tables found
with those wanted serves all versions: a writer adds what is missing, a reader, which writes nothing, puts
empty temporary tables and views with NULL columns over it.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3

from insitu.types import arm_of

SCHEMA_VERSION = 8
OLDEST_VERSION = 5
"""Oldest schema that can be opened."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS rollouts (
  rollout_id TEXT PRIMARY KEY, schema_version INTEGER NOT NULL, ulid TEXT NOT NULL,
  phase TEXT NOT NULL, step INTEGER NOT NULL, group_no INTEGER NOT NULL, slot INTEGER NOT NULL,
  task_id TEXT NOT NULL, category TEXT NOT NULL, status TEXT NOT NULL, reward REAL,
  components TEXT NOT NULL, attempt INTEGER NOT NULL,
  error TEXT NOT NULL, deleted TEXT NOT NULL, timings TEXT NOT NULL, ledger TEXT NOT NULL, egress INTEGER,
  calls INTEGER, part TEXT,
  UNIQUE (phase, step, group_no, slot)) STRICT;
CREATE INDEX IF NOT EXISTS rollouts_by_task ON rollouts (task_id);
CREATE TABLE IF NOT EXISTS attempts (
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, schema_version INTEGER NOT NULL,
  status TEXT NOT NULL, error TEXT NOT NULL, timings TEXT NOT NULL, ledger TEXT NOT NULL, egress INTEGER,
  began_s REAL, ended_s REAL, PRIMARY KEY (rollout_id, attempt)) STRICT;
CREATE TABLE IF NOT EXISTS files (
  rollout_id TEXT NOT NULL, path TEXT NOT NULL, schema_version INTEGER NOT NULL,
  executable INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY (rollout_id, path)) STRICT;
CREATE TABLE IF NOT EXISTS turns (
  rollout_id TEXT NOT NULL, position INTEGER NOT NULL, schema_version INTEGER NOT NULL,
  turn INTEGER NOT NULL, parent INTEGER NOT NULL, finish TEXT NOT NULL, version_runs TEXT NOT NULL,
  excluded TEXT NOT NULL, began_s REAL, first_s REAL, ended_s REAL, cached INTEGER, spans TEXT,
  context_ids BLOB NOT NULL, ids BLOB NOT NULL, logprobs BLOB,
  PRIMARY KEY (rollout_id, position)) STRICT;
CREATE TABLE IF NOT EXISTS segments (
  rollout_id TEXT NOT NULL, position INTEGER NOT NULL, schema_version INTEGER NOT NULL,
  segment INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL, ids BLOB NOT NULL,
  mask BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, experts BLOB,
  PRIMARY KEY (rollout_id, position)) STRICT;
CREATE TABLE IF NOT EXISTS notes (
  rollout_id TEXT PRIMARY KEY, schema_version INTEGER NOT NULL,
  drifts TEXT NOT NULL, hints TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS verdicts (
  rollout_id TEXT PRIMARY KEY, schema_version INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL,
  trust TEXT NOT NULL, passed INTEGER NOT NULL, total INTEGER NOT NULL, dropped_paths TEXT NOT NULL,
  reason TEXT NOT NULL, task_hash TEXT NOT NULL, diff_hash TEXT NOT NULL, duration_s REAL NOT NULL,
  tests TEXT NOT NULL, controls TEXT NOT NULL, image TEXT NOT NULL, grader TEXT NOT NULL,
  evidence TEXT) STRICT;
CREATE TABLE IF NOT EXISTS diffs (
  rollout_id TEXT PRIMARY KEY, schema_version INTEGER NOT NULL, text TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS states (
  rollout_id TEXT PRIMARY KEY, schema_version INTEGER NOT NULL, phase TEXT NOT NULL, step INTEGER NOT NULL,
  group_no INTEGER NOT NULL, slot INTEGER NOT NULL, task_id TEXT NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL, attempt INTEGER NOT NULL, version INTEGER NOT NULL, oldest INTEGER, account INTEGER,
  UNIQUE (phase, step, group_no, slot)) STRICT;
CREATE INDEX IF NOT EXISTS states_by_state ON states (state);
CREATE INDEX IF NOT EXISTS states_by_account ON states (account);
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER PRIMARY KEY, schema_version INTEGER NOT NULL, committed_s REAL NOT NULL,
  checkpoint TEXT NOT NULL, plan_hash TEXT NOT NULL, metrics TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS ledger (
  step INTEGER NOT NULL, entry TEXT NOT NULL, schema_version INTEGER NOT NULL, tokens INTEGER NOT NULL,
  PRIMARY KEY (step, entry)) STRICT;
"""
"""`ledger.entry` is `captured`, `trained` or a reason of `EXCLUSIONS`. `notes` has rows only for rollouts
with drifts or hints. In `turns` the small columns stand before the blobs: reading them must not walk through
pages of tokens."""

TASK_SET = "task_set_of(part)"
"""SQL of `Rollout.task_set`, by a function that every connection has."""
GROUP_ID = """(CASE r.phase WHEN 'serve' THEN r.task_id
  ELSE printf('%s/%05d/%03d', r.phase, r.step, r.group_no) END)"""
"""SQL of `Group.id` for a row `r` of rollouts; sessions of one task are a group."""


def task_set_of(part: str | None) -> str:
    """Return `Rollout.task_set` of a stored part; rollouts of earlier versions have none."""
    return arm_of(part or "").task_set


def migrate(db: sqlite3.Connection) -> None:
    """Create what the store lacks of SCHEMA, inside the caller's transaction."""
    for table, columns in _missing(db).items():
        for name, kind in columns.items():
            db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
    for statement in SCHEMA.split(";\n"):
        db.execute(statement)
    db.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))


def cover(db: sqlite3.Connection) -> None:
    """Let a read-only connection see an older store with the tables and columns of SCHEMA."""
    db.execute("PRAGMA temp_store = MEMORY")
    for table, columns in _missing(db).items():
        added = ", ".join(f"NULL AS {name}" for name in columns)
        db.execute(f"CREATE TEMP VIEW {table} AS SELECT rowid AS rowid, *, {added} FROM main.{table}")
    known = {row[0] for row in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
    for statement in SCHEMA.split(";\n"):
        _, is_table, rest = statement.partition("CREATE TABLE IF NOT EXISTS ")
        if is_table and rest.split(" ", 1)[0] not in known:
            db.execute(f"CREATE TEMP TABLE {rest}")


def _missing(db: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """Return table -> column -> type for columns that existing tables lack."""
    found: dict[str, dict[str, str]] = {}
    for table, columns in _wanted().items():
        here = {row[1] for row in db.execute(f"PRAGMA main.table_info({table})")}
        lacking = {name: kind for name, kind in columns.items() if name not in here}
        if here and lacking:
            found[table] = lacking
    return found


def nullable_columns(table: str) -> dict[str, bool]:
    """Return column -> whether it may be NULL."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return {row[1]: not row[3] for row in db.execute(f"PRAGMA table_info({table})")}


@functools.cache
def _wanted() -> dict[str, dict[str, str]]:
    """Return table -> column -> type of SCHEMA; a viewer opens the store many times."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in SCHEMA.split(";\n"):
            db.execute(statement)
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            table: {row[1]: row[2] for row in db.execute(f"PRAGMA table_info({table})")} for table in tables
        }
