"""Serialization of a Rollout to SQLite rows and back.

Token ids are little-endian int32 blobs, log-probabilities float32, masks one byte per token. Segments store
log-probabilities and versions only where the mask is set; a segment with other non-zero values is rejected.
Experts are a compressed int16 .npy file of every token.
Every row carries the schema version it was written with.
"""

from __future__ import annotations

import functools
import io
import math
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from insitu.errors import RecordError
from insitu.storage.schema import SCHEMA_VERSION
from insitu.types import (
    CallTimes,
    DriftNote,
    ExpertArray,
    FailingCheck,
    FileEntry,
    FloatArray,
    IntArray,
    Ledger,
    Outcome,
    Rollout,
    Segment,
    Status,
    Timings,
    Trajectory,
    Turn,
    Verdict,
)

Row = Mapping[str, Any]
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


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
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def write_rollout(db: sqlite3.Connection, place: Mapping[str, object], rollout: Rollout) -> None:
    """Insert every row of a rollout, inside the caller's transaction.

    `place`: ulid, phase, step, group_no, slot.
    """
    _check_reward(rollout.id, rollout.reward)
    write_attempt(db, rollout)
    values = {
        **place,
        **_attempt_values(rollout),
        "task_id": rollout.task_id,
        "category": rollout.category,
        "part": rollout.part or None,
        "reward": rollout.reward,
        "components": dumps(dict(rollout.reward_components)),
        "deleted": dumps(rollout.deleted),
        "calls": len(rollout.trajectory.turns),
    }
    insert(db, "rollouts", values)
    if rollout.diff is not None:
        insert(db, "diffs", {"rollout_id": rollout.id, "text": rollout.diff})
    for path, entry in rollout.changed.items():
        insert(db, "files", {"rollout_id": rollout.id, "path": path} | _file_values(entry))
    stamp = {"rollout_id": rollout.id, "schema_version": SCHEMA_VERSION}
    turns = [stamp | {"position": n} | _turn_values(turn) for n, turn in enumerate(rollout.trajectory.turns)]
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
    began_s = rollout.began_s
    ended_s = None if began_s is None else began_s + rollout.timings.total_s
    times = {"began_s": began_s, "ended_s": ended_s}
    insert(db, "attempts", _attempt_values(rollout) | times, replace=True)


def erase_rollout(db: sqlite3.Connection, rollout_id: str) -> None:
    """Delete every row of a decided rollout; the rows of its attempts stay."""
    for table in ("rollouts", "files", "turns", "segments", "notes", "verdicts", "diffs"):
        db.execute(f"DELETE FROM {table} WHERE rollout_id = ?", (rollout_id,))


def read_ledger(text: str) -> Ledger:
    return Ledger(**orjson.loads(text))


def _attempt_values(rollout: Rollout) -> dict[str, object]:
    ledger = rollout.trajectory.ledger
    account = {"captured": ledger.captured, "trained": ledger.trained, "excluded": dict(ledger.excluded)}
    return {
        "rollout_id": rollout.id,
        "attempt": rollout.attempt,
        "status": rollout.status.value,
        "error": rollout.error,
        "timings": dumps({name: getattr(rollout.timings, name) for name in Timings.__dataclass_fields__}),
        "ledger": dumps(account),
        "egress": rollout.egress_attempts,
    }


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
    return Rollout(
        id=rollout_id,
        task_id=row["task_id"],
        category=row["category"],
        part=row["part"] or "",
        status=Status(row["status"]),
        reward=row["reward"],
        trajectory=Trajectory(
            segments=tuple(_segment(r) for r in segments),
            turns=tuple(_turn(r, hints) for r in turns),
            ledger=read_ledger(row["ledger"]),
            drifts=drifts,
        ),
        verdict=None if verdict is None else _verdict(verdict),
        changed={r["path"]: FileEntry(content=r["content"], executable=bool(r["executable"])) for r in files},
        deleted=tuple(orjson.loads(row["deleted"])),
        timings=Timings(**orjson.loads(row["timings"])),
        attempt=row["attempt"],
        error=row["error"],
        egress_attempts=row["egress"],
        reward_components=orjson.loads(row["components"]),
        began_s=began["began_s"] if began else None,
        diff=diff["text"] if diff else None,
    )


def _file_values(entry: FileEntry) -> dict[str, object]:
    return {"executable": int(entry.executable), "content": bytes(entry.content)}


def _turn_values(turn: Turn) -> dict[str, object]:
    return {
        "turn": turn.index,
        "parent": turn.parent,
        "context_ids": _int_blob(turn.context_ids),
        "ids": _int_blob(turn.ids),
        "logprobs": None if turn.logprobs is None else _float_blob(turn.logprobs),
        "finish": turn.finish,
        "version_runs": dumps(turn.version_runs),
        "excluded": turn.excluded,
        "spans": dumps(turn.spans) if turn.spans else None,
        **{name: getattr(turn.times, name) for name in CallTimes.__dataclass_fields__},
    }


Pairs = tuple[tuple[str, str], ...]
Hints = Mapping[int, tuple[Pairs, Pairs]]
"""Turn -> (client metadata, ignored parameters)."""


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
    names = DriftNote.__dataclass_fields__
    drifts = [{name: getattr(note, name) for name in names} for note in trajectory.drifts]
    return {"drifts": dumps(drifts), "hints": dumps(hints)}


def read_drifts(db: sqlite3.Connection) -> list[DriftNote]:
    """Return the drifts of all stored rollouts."""
    rows = db.execute("SELECT drifts FROM notes ORDER BY rollout_id")
    return [DriftNote(**note) for row in rows for note in orjson.loads(row["drifts"])]


def _pairs(items: Iterable[tuple[str, str]]) -> Pairs:
    return tuple((name, value) for name, value in items)


def _read_notes(
    db: sqlite3.Connection, rollout_id: str, turns: Iterable[int]
) -> tuple[Hints, tuple[DriftNote, ...]]:
    """Return the hints of each turn (`turns`: indices in order) and the drifts of a rollout."""
    row = db.execute("SELECT * FROM notes WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        return {}, ()
    hints: dict[int, tuple[Pairs, Pairs]] = {}
    stored = {turn: values for turn, *values in orjson.loads(row["hints"])}
    advisory: Pairs = ()
    for turn in turns:
        values = stored.get(turn, ((),))
        advisory = _pairs(values[1]) if len(values) > 1 else advisory
        hints[turn] = (_pairs(values[0]), advisory)
    return hints, tuple(DriftNote(**note) for note in orjson.loads(row["drifts"]))


def _turn(row: Row, hints: Hints) -> Turn:
    turn_hints, advisory = hints.get(row["turn"], ((), ()))
    return Turn(
        index=row["turn"],
        parent=row["parent"],
        context_ids=_ints(row["context_ids"]),
        ids=_ints(row["ids"]),
        logprobs=None if row["logprobs"] is None else _floats(row["logprobs"]),
        finish=row["finish"],
        version_runs=tuple((start, version) for start, version in orjson.loads(row["version_runs"])),
        excluded=row["excluded"],
        hints=turn_hints,
        advisory=advisory,
        spans=tuple(tuple(span) for span in orjson.loads(row["spans"] or "[]")),
        times=CallTimes(**{name: row[name] for name in CallTimes.__dataclass_fields__}),
    )


def _segment_values(segment: Segment) -> dict[str, object]:
    outside = ~segment.mask
    if segment.logprobs[outside].any() or segment.versions[outside].any():
        raise RecordError(f"{segment.rollout_id}: segment {segment.index} has values outside its mask")
    return {
        "segment": segment.index,
        "owner": segment.rollout_id,
        "kind": segment.kind,
        "label": segment.label,
        "ids": _int_blob(segment.ids),
        "mask": segment.mask.astype(np.uint8).tobytes(),
        "logprobs": _float_blob(segment.logprobs[segment.mask]),
        "versions": _int_blob(segment.versions[segment.mask]),
        "experts": None if segment.experts is None else pack_experts(segment.experts),
    }


def _segment(row: Row) -> Segment:
    mask = np.frombuffer(row["mask"], dtype=np.bool_)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = _floats(row["logprobs"])
    versions = np.zeros(len(mask), dtype=np.int32)
    versions[mask] = _ints(row["versions"])
    for array in (logprobs, versions):
        array.flags.writeable = False
    return Segment(
        rollout_id=row["owner"],
        index=row["segment"],
        kind=row["kind"],
        label=row["label"],
        ids=_ints(row["ids"]),
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        experts=None if row["experts"] is None else unpack_experts(row["experts"]),
    )


def pack_experts(experts: ExpertArray) -> bytes:
    """Return a compressed .npy file."""
    out = io.BytesIO()
    np.save(out, experts.astype("<i2", casting="safe"))
    return zlib.compress(out.getvalue(), 1)


def unpack_experts(blob: bytes) -> ExpertArray:
    """Return what `pack_experts` packed. Raises ValueError and zlib.error for anything else."""
    found: ExpertArray = np.load(io.BytesIO(zlib.decompress(blob)))
    found.flags.writeable = False
    return found


def _verdict_values(verdict: Verdict) -> dict[str, object]:
    return {
        "outcome": verdict.outcome.value,
        "reward": verdict.reward,
        "trust": verdict.trust,
        "passed": verdict.passed,
        "total": verdict.total,
        "dropped_paths": dumps(verdict.dropped_paths),
        "reason": verdict.reason,
        "task_hash": verdict.task_hash,
        "diff_hash": verdict.diff_hash,
        "duration_s": verdict.duration_s,
        "tests": dumps([verdict.fail_to_pass, verdict.pass_to_pass]),
        "controls": verdict.controls,
        "image": verdict.image,
        "grader": verdict.grader,
        "evidence": None if verdict.evidence is None else dumps([c.to_dict() for c in verdict.evidence]),
    }


def _verdict(row: Row) -> Verdict:
    (fixed, to_fix), (kept, to_keep) = orjson.loads(row["tests"])
    return Verdict(
        outcome=Outcome(row["outcome"]),
        reward=row["reward"],
        trust=row["trust"],
        passed=row["passed"],
        total=row["total"],
        dropped_paths=tuple(orjson.loads(row["dropped_paths"])),
        reason=row["reason"],
        task_hash=row["task_hash"],
        diff_hash=row["diff_hash"],
        duration_s=row["duration_s"],
        fail_to_pass=(fixed, to_fix),
        pass_to_pass=(kept, to_keep),
        controls=row["controls"],
        image=row["image"],
        grader=row["grader"],
        evidence=_evidence(row["evidence"]),
    )


def _evidence(text: str | None) -> tuple[FailingCheck, ...] | None:
    return None if text is None else tuple(FailingCheck(**check) for check in orjson.loads(text))


def _int_blob(array: IntArray) -> bytes:
    return array.astype(_I4, casting="safe", copy=False).tobytes()


def _float_blob(array: FloatArray) -> bytes:
    return array.astype(_F4, casting="safe", copy=False).tobytes()


def _ints(blob: bytes) -> IntArray:
    return np.frombuffer(blob, dtype="<i4")


def _floats(blob: bytes) -> FloatArray:
    return np.frombuffer(blob, dtype="<f4")
