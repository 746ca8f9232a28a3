"""SQLite database in WAL mode with a single writer.

Each write is one transaction. When its block ends it survives the end of the process, and that of the machine
if it is synced (docs/internals/storage.md). The file can be read while no process is running. Thread-safe
within one process. Errors are `RecordError` with a one-line message.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from insitu import failpoint
from insitu.errors import RecordError
from insitu.storage.metrics import disk_error
from insitu.storage.schema import OLDEST_VERSION, SCHEMA_VERSION, cover, migrate, task_set_of

_BUSY_TIMEOUT_S = 5.0
_DAMAGED = ("file is not a database", "database disk image is malformed")
"""SQLite's error messages for unreadable files."""


class EmptyStore(RecordError):
    """The database exists but has no tables yet: its writer has just started or died early."""


class Database:
    """SQLite connection and its transactions; a context manager."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._synced = True
        try:
            self._db = _connect(path, readonly)
        except sqlite3.Error as error:
            why = error if os.access(path, os.R_OK) or not path.exists() else "permission denied"
            raise RecordError(f"cannot open {path}: {why}") from error
        self._db.row_factory = sqlite3.Row
        self._db.create_function("task_set_of", 1, task_set_of, deterministic=True)
        try:
            self._prepare(readonly)
        except BaseException:
            self._db.close()
            raise

    @property
    def path(self) -> Path:
        """The database file."""
        return self._path

    def close(self) -> None:
        """Close the connection; idempotent. Everything stored is already durable."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_meta(self, key: str, value: str) -> None:
        """Store a key-value fact of the run (agent version, host, ...)."""
        with self._writing("meta") as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def meta(self) -> dict[str, str]:
        """Return all key-value facts, including `schema_version`."""
        return {row["key"]: row["value"] for row in self._all("SELECT key, value FROM meta")}

    def _prepare(self, readonly: bool) -> None:
        if not readonly:
            with self._sql():
                # Of a new file; with SQLite's 4 KiB the tokens of a rollout take a fifth more space and time.
                self._db.execute("PRAGMA page_size = 8192")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._set_synced(True)
        fresh = not self._all("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        if fresh and readonly:
            raise EmptyStore(f"{self._path} holds no rollouts yet")
        version = str(SCHEMA_VERSION) if fresh else self.meta().get("schema_version", "")
        if version not in map(str, range(OLDEST_VERSION, SCHEMA_VERSION + 1)):
            raise RecordError(
                f"{self._path} has schema version {version or 'none'};"
                f" this insitu reads {OLDEST_VERSION} to {SCHEMA_VERSION}"
            )
        if readonly and version != str(SCHEMA_VERSION):
            with self._reading() as db:
                cover(db)
        elif not readonly and (fresh or version != str(SCHEMA_VERSION)):
            with self._writing("schema") as db:
                migrate(db)

    def _all(self, query: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[sqlite3.Row]:
        with self._reading() as db:
            return db.execute(query, values).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._sql(reading=True):
            yield self._db

    def _set_synced(self, synced: bool) -> None:
        self._db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        self._synced = synced

    @contextmanager
    def _writing(self, what: str, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction. `what` names its failpoint; not `synced`: the next one that is syncs it too."""
        with self._lock, self._sql():
            if synced != self._synced:
                self._set_synced(synced)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                failpoint.hit(f"{what}.before")
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite rolls back by itself after some errors, for example a full disk.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            failpoint.hit(f"{what}.after")

    @contextmanager
    def _sql(self, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # A damaged file can fail at any statement, so its message decides between read and write errors.
            if reading or str(error) in _DAMAGED:
                raise RecordError(f"cannot read {self._path}: {error}") from error
            raise disk_error(self._path, error) from error


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    uri = path.absolute().as_uri()
    if readonly:
        # Without a write-ahead log the file is complete and may be on a read-only disk.
        logged = path.with_name(path.name + "-wal").exists()
        uri += "?mode=ro" if logged else "?mode=ro&immutable=1"
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
