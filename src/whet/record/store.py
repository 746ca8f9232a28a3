"""The run's memory: SQLite in WAL mode, one writer, readable with no process alive.

Invariants: `put_rollout` returns after the rollout is on disk (synchronous=FULL), so a graded rollout is
durable before it is counted; `commit_step` is one transaction, so a step is committed wholly or not at all.
After kill -9 at any moment a new Store sees every rollout and step whose call had returned.

Calls block for a few milliseconds and are safe from several threads of one process. That only one process
writes is the run directory's lock's business (`run.RunDir`). Errors are `RecordError`, one line.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from whet.errors import RecordError
from whet.record.metrics import Metrics, disk_error
from whet.record.outline import Outline, read_outlines
from whet.record.rows import (
    SCHEMA,
    SCHEMA_VERSION,
    Row,
    dumps,
    erase_rollout,
    insert,
    read_drifts,
    read_ledger,
    read_rollout,
    rewrite_verdict,
    write_attempt,
    write_rollout,
)
from whet.record.ulid import new_ulid
from whet.types import DriftNote, Ledger, Rollout, Status, Verdict

_BUSY_TIMEOUT_S = 5.0
_DAMAGED = ("file is not a database", "database disk image is malformed")
"""What SQLite says of a file that it cannot read."""


class EmptyStore(RecordError):
    """The file is there and nothing is in it yet: its writer has just begun, or died then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed optimizer step."""

    step: int
    checkpoint: str
    """Where the weights after this step are, relative to the run directory."""
    plan_hash: str
    """Hex digest of the trained plan: equal after a bit-identical resume."""
    metrics: Mapping[str, Any] = field(repr=False)
    ledger: Ledger
    committed_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How many of the graded rollouts were solved. Infrastructure failures are in neither number."""

    solved: int
    total: int

    @property
    def rate(self) -> float:
        """Solve rate; 0 when nothing was graded."""
        return self.solved / self.total if self.total else 0.0


class Store:
    """Open with `Store(path)` to write or `Store(path, readonly=True)` to look. A context manager."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._db = _connect(path, readonly)
        except sqlite3.Error as error:
            raise RecordError(f"cannot open {path}: {error}") from error
        self._db.row_factory = sqlite3.Row
        try:
            self._prepare(readonly)
        except BaseException:
            self._db.close()
            raise

    # ------------------------------------------------------------------ rollouts

    def put_rollout(self, phase: str, step: int, group: int, slot: int, rollout: Rollout) -> None:
        """Store a decided rollout; on return it is durable. A rollout is stored once: a second is refused,
        unless the first failed of the infrastructure and nothing has been trained since."""
        place = {"ulid": new_ulid(), "phase": phase, "step": step, "group_no": group, "slot": slot}
        with self._writing() as db:
            seen = db.execute("SELECT status FROM rollouts WHERE rollout_id = ?", (rollout.id,)).fetchone()
            if seen is not None:
                if seen["status"] != Status.INFRA_FAILED.value or not self._open(db, phase, step):
                    raise RecordError(f"rollout {rollout.id} is stored already")
                erase_rollout(db, rollout.id)
            write_rollout(db, place, rollout)

    def put_verdict(self, rollout_id: str, verdict: Verdict) -> None:
        """Replace the verdict, and with it the reward, of a stored rollout."""
        with self._writing() as db:
            rewrite_verdict(db, rollout_id, verdict)

    def still_open(self, phase: str, step: int) -> bool:
        """True while rollouts of this phase and step would still be made by the weights they belong to."""
        with self._reading() as db:
            return self._open(db, phase, step)

    @staticmethod
    def _open(db: sqlite3.Connection, phase: str, step: int) -> bool:
        last: int = db.execute("SELECT COALESCE(MAX(step), 0) AS step FROM steps").fetchone()["step"]
        return step > last if phase == "train" else step >= last

    def put_attempt(self, rollout: Rollout) -> None:
        """Record one try at a slot that failed, with its account; the last one comes by `put_rollout`."""
        with self._writing() as db:
            write_attempt(db, rollout)

    def tried(self, prefix: str) -> dict[str, int]:
        """Rollout id -> number of its last recorded try, for ids that begin with `prefix`."""
        query = "SELECT rollout_id, MAX(attempt) AS n FROM attempts GROUP BY rollout_id"
        found = {row["rollout_id"]: row["n"] for row in self._all(query)}
        return {rollout_id: n for rollout_id, n in found.items() if rollout_id.startswith(prefix)}

    def attempts(self, rollout_id: str) -> list[tuple[int, Status, str]]:
        """(attempt, status, error) of every recorded try, in order."""
        rows = self._all("SELECT * FROM attempts WHERE rollout_id = ? ORDER BY attempt", (rollout_id,))
        return [(row["attempt"], Status(row["status"]), row["error"]) for row in rows]

    def rollouts(self, phase: str, step: int) -> list[Rollout]:
        """Rollouts of one phase and step by (group, slot): equal to what was put, arrays read-only."""
        query = "SELECT * FROM rollouts WHERE phase = ? AND step = ? ORDER BY group_no, slot"
        with self._reading() as db:
            return [read_rollout(db, row) for row in db.execute(query, (phase, step)).fetchall()]

    def rollout(self, rollout_id: str) -> Rollout:
        """One rollout by its id. Raises RecordError when there is none."""
        with self._reading() as db:
            row = db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
            if row is None:
                raise RecordError(f"{self._path} holds no rollout {rollout_id}")
            return read_rollout(db, row)

    def outcomes(self, phase: str, step: int) -> list[Outline]:
        """How the rollouts of one phase and step ended, by (group, slot), without reading tokens or files."""
        with self._reading() as db:
            return read_outlines(db, phase, step)

    def drifts(self) -> list[DriftNote]:
        """Requests of all stored rollouts that did not simply continue what was held."""
        with self._reading() as db:
            return read_drifts(db)

    def places(self, phase: str, step: int) -> dict[tuple[int, int], str]:
        """(group, slot) -> rollout id of what is stored; a resumed collector fills the rest."""
        query = "SELECT group_no, slot, rollout_id FROM rollouts WHERE phase = ? AND step = ?"
        rows = self._all(query, (phase, step))
        return {(row["group_no"], row["slot"]): row["rollout_id"] for row in rows}

    def phases(self) -> dict[tuple[str, int], int]:
        """(phase, step) -> number of stored rollouts, in the order of their first rollout."""
        query = "SELECT phase, step, COUNT(*) AS n FROM rollouts GROUP BY phase, step ORDER BY MIN(ulid)"
        return {(row["phase"], row["step"]): row["n"] for row in self._all(query)}

    def scores(self, phase: str, step: int) -> dict[str, Score]:
        """Task family -> score of one phase and step; the key "" is the total."""
        query = (
            "SELECT r.family, SUM(v.outcome = 'resolved') AS solved, COUNT(*) AS total"
            " FROM rollouts r JOIN verdicts v USING (rollout_id)"
            " WHERE r.phase = ? AND r.step = ? AND r.reward IS NOT NULL GROUP BY r.family ORDER BY r.family"
        )
        rows = self._all(query, (phase, step))
        total = Score(solved=sum(r["solved"] for r in rows), total=sum(r["total"] for r in rows))
        by_family = {row["family"]: Score(solved=row["solved"], total=row["total"]) for row in rows}
        return {"": total} | {family: score for family, score in by_family.items() if family}

    def ledger(self) -> Ledger:
        """The account of everything that is stored: committed steps, evaluations, and every failed try.

        Raises RecordError when it does not balance or a sampled token is in none of them.
        """
        failed = (
            "SELECT a.ledger FROM attempts a LEFT JOIN rollouts r USING (rollout_id, attempt)"
            " WHERE r.rollout_id IS NULL"
        )
        decided = self._all("SELECT phase, ledger FROM rollouts")
        tries = [read_ledger(row["ledger"]) for row in self._all(failed)]
        others = [read_ledger(row["ledger"]) for row in decided if row["phase"] != "train"]
        total = add_ledgers([*(step.ledger for step in self.steps()), *others, *tries])
        stored = sum(read_ledger(row["ledger"]).captured for row in decided) + sum(t.captured for t in tries)
        if not total.balanced or total.captured != stored:
            raise RecordError(f"the ledger of the run does not balance: {total}, {stored} tokens are stored")
        return total

    # ------------------------------------------------------------------ steps

    def commit_step(
        self,
        step: int,
        metrics: Metrics,
        checkpoint: str,
        plan_hash: str,
        ledger: Ledger,
        *,
        meta: Mapping[str, str] | None = None,
    ) -> None:
        """Commit one optimizer step in one transaction, after its checkpoint is on disk; facts in `meta` are
        stored with it. Steps only grow; a step is committed once. Raises RecordError."""
        if not ledger.balanced:
            raise RecordError(f"step {step}: the ledger does not balance: {ledger}")
        with self._writing() as db:
            last = db.execute("SELECT MAX(step) AS step FROM steps").fetchone()["step"]
            if last is not None and step <= last:
                raise RecordError(f"step {step} cannot follow step {last}: it would be trained twice")
            values: dict[str, object] = {"step": step, "committed_s": time.time(), "checkpoint": checkpoint}
            insert(db, "steps", values | {"plan_hash": plan_hash, "metrics": dumps(dict(metrics))})
            entries = {"captured": ledger.captured, "trained": ledger.trained, **ledger.excluded}
            for entry, tokens in entries.items():
                insert(db, "ledger", {"step": step, "entry": entry, "tokens": tokens})
            for fact in (meta or {}).items():
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", fact)

    def steps(self) -> list[StepRecord]:
        """Every committed step in order."""
        with self._reading() as db:
            rows = db.execute("SELECT * FROM steps ORDER BY step").fetchall()
            return [_step(db, row) for row in rows]

    def last_step(self) -> StepRecord | None:
        """The newest committed step; None before the first. A resumed run starts after it."""
        with self._reading() as db:
            row = db.execute("SELECT * FROM steps ORDER BY step DESC LIMIT 1").fetchone()
            return None if row is None else _step(db, row)

    # ------------------------------------------------------------------ meta

    def set_meta(self, key: str, value: str) -> None:
        """Remember a small fact of the run (agent version, host, ...)."""
        with self._writing() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def meta(self) -> dict[str, str]:
        """All facts, `schema_version` among them."""
        return {row["key"]: row["value"] for row in self._all("SELECT key, value FROM meta")}

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Idempotent. Everything stored is durable already."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self, readonly: bool) -> None:
        if not readonly:
            with self._sql():
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
            with self._writing() as db:
                for statement in SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        elif not self._all("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            raise EmptyStore(f"{self._path} holds no rollouts yet")
        version = self.meta().get("schema_version", "")
        if version != str(SCHEMA_VERSION):
            raise RecordError(
                f"{self._path} has schema version {version or 'none'}; this whet reads {SCHEMA_VERSION}"
            )

    def _all(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        with self._reading() as db:
            return db.execute(query, values).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._sql(reading=True):
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is on disk when the block ends, or none of it."""
        with self._lock, self._sql():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, a full disk among them.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _sql(self, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # a file that is not, or no longer, a database fails at its first use of any kind
            if reading or str(error) in _DAMAGED:
                raise RecordError(f"cannot read {self._path}: {error}") from error
            raise disk_error(self._path, error) from error


def add_ledgers(ledgers: Sequence[Ledger]) -> Ledger:
    """Sum of accounts."""
    excluded: dict[str, int] = {}
    for ledger in ledgers:
        for reason, tokens in ledger.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + tokens
    return Ledger(
        captured=sum(x.captured for x in ledgers),
        trained=sum(x.trained for x in ledgers),
        excluded=dict(sorted(excluded.items())),
    )


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    uri = path.absolute().as_uri()
    if readonly:
        # Without a write-ahead log the file is complete by itself and may lie on a read-only disk.
        logged = path.with_name(path.name + "-wal").exists()
        uri += "?mode=ro" if logged else "?mode=ro&immutable=1"
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )


def _step(db: sqlite3.Connection, row: Row) -> StepRecord:
    entries = db.execute("SELECT entry, tokens FROM ledger WHERE step = ?", (row["step"],)).fetchall()
    account = {entry["entry"]: entry["tokens"] for entry in entries}
    return StepRecord(
        step=row["step"],
        checkpoint=row["checkpoint"],
        plan_hash=row["plan_hash"],
        metrics=orjson.loads(row["metrics"]),
        ledger=Ledger(captured=account.pop("captured"), trained=account.pop("trained"), excluded=account),
        committed_s=row["committed_s"],
    )
