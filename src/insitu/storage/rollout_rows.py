"""Serialization of a Rollout to SQLite rows and back.

Each field stands in the column of its name (columns.py). Segments store log-probabilities and versions only
where the mask is set; a segment with other non-zero values is rejected.
Every row carries the schema version it was written with.
"""

from __future__ import annotations

import functools
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import orjson

from insitu.errors import RecordError
from insitu.storage.columns import Row, TableColumns
from insitu.storage.schema import SCHEMA_VERSION
from insitu.types import (
    CallTimes,
    DriftNote,
    FileEntry,
    Ledger,
    Rollout,
    Segment,
    Trajectory,
    Turn,
    Verdict,
)
from insitu.types.codec import dumps as json_of
from insitu.types.codec import read

_ROLLOUT = TableColumns(
    "rollouts", Rollout, rollout_id="id", components="reward_components", egress="egress_attempts"
)
_ATTEMPT = TableColumns("attempts", Rollout, rollout_id="id", egress="egress_attempts")
_LEDGER = TableColumns("rollouts", Trajectory)
_FILE = TableColumns("files", FileEntry)
_TURN, _TIMES = TableColumns("turns", Turn, turn="index"), TableColumns("turns", CallTimes)
_SEGMENT = TableColumns("segments", Segment, segment="index", owner="rollout_id")
_DRIFTS = TableColumns("notes", Trajectory)
_VERDICT = TableColumns("verdicts", Verdict)
_TESTS = tuple[tuple[int, int], tuple[int, int]]
"""Of column `tests`: `Verdict.fail_to_pass` and `pass_to_pass`."""


def insert(
    db: sqlite3.Connection, table: str, values: Mapping[str, object], *, replace: bool = False
) -> None:
    """Insert one row, stamped with the schema version."""
    row = {**values, "schema_version": SCHEMA_VERSION}
    db.execute(_statement("INSERT OR REPLACE" if replace else "INSERT", table, tuple(row)), row)


@functools.cache
def _statement(verb: str, table: str, names: Sequence[str]) -> str:
    placeholders = ", ".join(f":{name}" for name in names)
    return f"{verb} INTO {table} ({', '.join(names)}) VALUES ({placeholders})"


def dumps(value: object) -> str:
    return json_of(value).decode()


def write_rollout(db: sqlite3.Connection, place: Mapping[str, object], rollout: Rollout) -> None:
    """Insert every row of a rollout, inside the caller's transaction.

    `place`: ulid, phase, step, group_no, slot.
    """
    _check_reward(rollout.id, rollout.reward)
    write_attempt(db, rollout)
    values = _ROLLOUT.write(rollout) | _LEDGER.write(rollout.trajectory)
    insert(db, "rollouts", {**place, **values, "calls": len(rollout.turns)})
    if rollout.diff is not None:
        insert(db, "diffs", {"rollout_id": rollout.id, "text": rollout.diff})
    for path, entry in rollout.changed.items():
        insert(db, "files", {"rollout_id": rollout.id, "path": path} | _FILE.write(entry))
    stamp = {"rollout_id": rollout.id, "schema_version": SCHEMA_VERSION}
    turns = [
        stamp | {"position": n} | _TURN.write(turn) | _TIMES.write(turn.times)
        for n, turn in enumerate(rollout.turns)
    ]
    if turns:
        db.executemany(_statement("INSERT", "turns", tuple(turns[0])), turns)
    for position, segment in enumerate(rollout.trajectory.segments):
        insert(db, "segments", {"rollout_id": rollout.id, "position": position} | _segment_values(segment))
    notes = _notes_values(rollout.trajectory)
    if notes:
        insert(db, "notes", {"rollout_id": rollout.id} | notes)
    if rollout.verdict is not None:
        insert(db, "verdicts", {"rollout_id": rollout.id} | _verdict_values(rollout.verdict))


def rewrite_reward(db: sqlite3.Connection, rollout: Rollout) -> None:
    """Replace verdict, reward and its components of a decided rollout."""
    _check_reward(rollout.id, rollout.reward)
    if rollout.verdict is not None:
        values = {"rollout_id": rollout.id} | _verdict_values(rollout.verdict)
        insert(db, "verdicts", values, replace=True)
    db.execute(
        "UPDATE rollouts SET reward = ?, components = ? WHERE rollout_id = ?",
        (rollout.reward, dumps(dict(rollout.reward_components)), rollout.id),
    )


def _check_reward(rollout_id: str, reward: float | None) -> None:
    # SQLite stores NaN as NULL, which would be read back as not graded.
    if reward is not None and not math.isfinite(reward):
        raise RecordError(f"rollout {rollout_id} has reward {reward}, which is not a finite number")


def write_attempt(db: sqlite3.Connection, rollout: Rollout) -> None:
    """Insert or replace the row of one attempt, with the ledger of its sampled tokens."""
    values = _ATTEMPT.write(rollout) | _LEDGER.write(rollout.trajectory)
    ended_s = None if rollout.began_s is None else rollout.began_s + rollout.timings.total_s
    insert(db, "attempts", values | {"ended_s": ended_s}, replace=True)


def erase_rollout(db: sqlite3.Connection, rollout_id: str) -> None:
    """Delete every row of a decided rollout; the rows of its attempts stay."""
    for table in ("rollouts", "files", "turns", "segments", "notes", "verdicts", "diffs"):
        db.execute(f"DELETE FROM {table} WHERE rollout_id = ?", (rollout_id,))


def read_ledger(text: str) -> Ledger:
    ledger: Ledger = read(Ledger, orjson.loads(text))
    return ledger


def read_rollout(db: sqlite3.Connection, row: Row) -> Rollout:
    """Return the Rollout of one row of `rollouts`, with read-only arrays."""
    rollout_id = row["rollout_id"]
    key = (rollout_id,)
    files = db.execute("SELECT * FROM files WHERE rollout_id = ? ORDER BY path", key)
    turns = db.execute("SELECT * FROM turns WHERE rollout_id = ? ORDER BY position", key).fetchall()
    segments = db.execute("SELECT * FROM segments WHERE rollout_id = ? ORDER BY position", key)
    verdict = db.execute("SELECT * FROM verdicts WHERE rollout_id = ?", key).fetchone()
    diff = db.execute("SELECT text FROM diffs WHERE rollout_id = ?", key).fetchone()
    began = db.execute(
        "SELECT began_s FROM attempts WHERE rollout_id = ? AND attempt = ?", (rollout_id, row["attempt"])
    ).fetchone()
    hints, drifts = _read_notes(db, rollout_id, [r["turn"] for r in turns])
    trajectory = Trajectory(
        segments=tuple(_segment(r) for r in segments),
        turns=tuple(_TURN.read(r, times=_TIMES.read(r), **hints.get(r["turn"], {})) for r in turns),
        drifts=drifts,
        **_LEDGER.fields_of(row),
    )
    return _ROLLOUT.read(
        row,
        trajectory=trajectory,
        verdict=None if verdict is None else _verdict(verdict),
        changed={r["path"]: _FILE.read(r) for r in files},
        began_s=began["began_s"] if began else None,
        diff=diff["text"] if diff else None,
    )


Pairs = tuple[tuple[str, str], ...]
Hints = Mapping[int, Mapping[str, Pairs]]
"""Turn -> its `hints` and `advisory`."""


def _notes_values(trajectory: Trajectory) -> dict[str, object]:
    """Return the values of the `notes` row; empty when there is nothing to store.

    Advisory parameters are stored only at the turns where they change.
    """
    hints: list[tuple[object, ...]] = []
    advisory: Pairs = ()
    for turn in trajectory.turns:
        if turn.advisory != advisory:
            hints.append((turn.index, turn.hints, turn.advisory))
        elif turn.hints:
            hints.append((turn.index, turn.hints))
        advisory = turn.advisory
    if not hints and not trajectory.drifts:
        return {}
    return _DRIFTS.write(trajectory) | {"hints": dumps(hints)}


def read_drifts(db: sqlite3.Connection) -> list[DriftNote]:
    """Return the drifts of all stored rollouts."""
    rows = db.execute("SELECT drifts FROM notes ORDER BY rollout_id")
    return [note for row in rows for note in _DRIFTS.fields_of(row)["drifts"]]


def _read_notes(
    db: sqlite3.Connection, rollout_id: str, turns: Iterable[int]
) -> tuple[Hints, tuple[DriftNote, ...]]:
    """Return the hints of each turn (`turns`: indices in order) and the drifts of a rollout."""
    row = db.execute("SELECT * FROM notes WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        return {}, ()
    hints: dict[int, Mapping[str, Pairs]] = {}
    stored = {turn: values for turn, *values in orjson.loads(row["hints"])}
    advisory: Pairs = ()
    for turn in turns:
        values = stored.get(turn, ((),))
        advisory = read(Pairs, values[1]) if len(values) > 1 else advisory
        hints[turn] = {"hints": read(Pairs, values[0]), "advisory": advisory}
    return hints, _DRIFTS.fields_of(row)["drifts"]


def _segment_values(segment: Segment) -> dict[str, object]:
    mask = segment.mask
    if segment.logprobs[~mask].any() or segment.versions[~mask].any():
        raise RecordError(f"{segment.rollout_id}: segment {segment.index} has values outside its mask")
    return _SEGMENT.write(replace(segment, logprobs=segment.logprobs[mask], versions=segment.versions[mask]))


def _segment(row: Row) -> Segment:
    found = _SEGMENT.fields_of(row)
    for name in ("logprobs", "versions"):
        held = found[name]
        found[name] = np.zeros(len(found["mask"]), held.dtype)
        found[name][found["mask"]] = held
        found[name].flags.writeable = False
    return Segment(**found)


def _verdict_values(verdict: Verdict) -> dict[str, object]:
    return _VERDICT.write(verdict) | {"tests": dumps([verdict.fail_to_pass, verdict.pass_to_pass])}


def _verdict(row: Row) -> Verdict:
    fail_to_pass, pass_to_pass = read(_TESTS, orjson.loads(row["tests"]))
    return _VERDICT.read(row, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)
