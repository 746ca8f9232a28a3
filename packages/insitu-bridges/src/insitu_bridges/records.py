"""Records of exported rollouts: one per rollout and one per segment, and back; pure.

A rollout record holds everything but the ids of its segments, which are in the row records. A turn says where
its ids are in a row; the ids of turns that are in no row are appended to `ids`. So each token is stored once
per row, and `read_rollout` returns the rollout bit for bit, without the failing checks of its verdict: those
show hidden tests.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from insitu.config.training import RowRules
from insitu.errors import RecordError, TrainError
from insitu.types import (
    ExpertArray,
    FileEntry,
    FloatArray,
    IntArray,
    Rollout,
    Segment,
    Trajectory,
    Turn,
    Verdict,
)
from insitu.types.codec import head, pick, read
from insitu.types.values import plain
from insitu_bridges.rows import RolloutRows
from insitu_train.branches import by_index, chain_ends, chain_of
from insitu_train.plan.row_selection import choose_rows

SCHEMA = 1
"""Version of the columns."""
ROWS: Mapping[str, str] = {
    "schema_version": "int",
    "run": "text",
    "phase": "text",
    "step": "int",
    "group_id": "text",
    "rollout_id": "text",
    "attempt": "int",
    "task_set": "text",
    "task_id": "text",
    "segment": "int",
    "label": "text",
    "kind": "text",
    "status": "text",
    "reward": "float",
    "advantage": "float",
    "weight": "float",
    "used": "text",
    "prompt_len": "int",
    "ids": "ints",
    "mask": "bools",
    "logprobs": "floats",
    "versions": "ints",
    "temperature": "float",
    "experts": "text",
}
"""Column -> kind, one row per segment. `used`: why its tokens are not trained, or empty; `weight`: factor of
the sum of its token losses; `prompt_len`: ids before the first trained one. A row's lists have one length.
`experts`: int16 [tokens, layers, k] as .npy file in base64, where a sampler returned them."""
OPTIONAL = frozenset({"experts", "task_set"})
"""Columns that an export of an earlier version lacks."""
ROLLOUTS: Mapping[str, str] = {
    "schema_version": "int",
    "run": "text",
    "phase": "text",
    "step": "int",
    "group_id": "text",
    "rollout_id": "text",
    "task_set": "text",
    "task_id": "text",
    "category": "text",
    "status": "text",
    "reward": "float",
    "components": "json",
    "advantage": "float",
    "used": "text",
    "outcome": "text",
    "verdict": "json",
    "messages": "messages",
    "diff": "text",
    "files": "json",
    "deleted": "json",
    "attempt": "int",
    "error": "text",
    "egress": "int",
    "timings": "json",
    "began_s": "float",
    "ledger": "json",
    "place": "json",
    "state": "json",
    "attempts": "json",
    "drifts": "json",
    "temperature": "float",
    "session": "text",
    "rows": "int",
    "turns": "json",
    "ids": "ints",
    "logprobs": "floats",
}
"""Column -> kind, one row per rollout. `place`, `state`, `attempts`: as in the store of the run; `session`:
the id of its segments, where it is another; `rows`: number of its segments."""
_RENAMED = {
    "rollout_id": "id",
    "components": "reward_components",
    "egress": "egress_attempts",
    "segment": "index",
}
"""Column -> field, where the names differ."""
Record = dict[str, Any]


def _fields_in(columns: Mapping[str, str], kind: type[Rollout | Segment], *apart: str) -> Mapping[str, str]:
    """Return column -> field of those that hold a field of `kind`, without those that are written apart."""
    named = {column: _RENAMED.get(column, column) for column in columns if column not in apart}
    return {column: name for column, name in named.items() if name in kind.__dataclass_fields__}


_OF_ROLLOUT = _fields_in(ROLLOUTS, Rollout, "verdict")
_OF_SEGMENT = _fields_in(ROWS, Segment, "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A decided rollout with what the store has beside it."""

    item: RolloutRows
    step: int
    """Optimizer step that counts its tokens, else the step that it was drawn for."""
    place: Mapping[str, Any]
    """rowid, ulid, phase, step, group_no, slot, part."""
    state: Mapping[str, Any]
    """state, reason, attempt, version, oldest, account."""
    attempts: Sequence[Mapping[str, Any]] = ()
    """Earlier attempts, which failed."""
    messages: Sequence[Mapping[str, str]] | None = None
    """role and content of the main line; None = no tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRollout:
    """A rollout read back from an export."""

    rollout: Rollout = field(repr=False)
    place: Mapping[str, Any]
    state: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]


def row_records(stored: StoredRollout, run: str, temperature: float) -> list[Record]:
    """Return one record per segment, as captured."""
    item, rollout = stored.item, stored.item.rollout
    chosen = {segment.index for segment in item.segments}
    trained = {row.segment for row in item.rows}
    shared = {
        "schema_version": SCHEMA,
        "run": run,
        "phase": stored.place["phase"],
        "step": stored.step,
        "group_id": item.group_id,
        "rollout_id": rollout.id,
        "attempt": rollout.attempt,
        "task_set": rollout.task_set,
        "task_id": rollout.task_id,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "advantage": item.advantage,
        "temperature": temperature,
    }
    records = []
    for segment in rollout.trajectory.segments:
        mask = segment.mask
        used = "" if segment.index in trained else item.reason
        if segment.kind == "demonstrated":
            used = "demonstrated"
        elif not item.reason and segment.index not in chosen:
            used = next(iter(item.excluded), "no_tokens")
        own = {column: getattr(segment, name) for column, name in _OF_SEGMENT.items()}
        records.append(
            shared
            | {name: own.pop(name) for name in ("segment", "label", "kind")}
            | {
                "used": used,
                "weight": 0.0 if used else item.weight,
                "prompt_len": int(mask.argmax()) if mask.any() else len(mask),
                **own,
                "experts": None if segment.experts is None else _npy(segment.experts),
            }
        )
    return records


def rollout_record(stored: StoredRollout, run: str, temperature: float) -> Record:
    """Return the record of a rollout without the ids of its segments."""
    item, rollout = stored.item, stored.item.rollout
    segments = rollout.trajectory.segments
    heads, ids, logprobs = _turn_heads(rollout.trajectory)
    verdict = None if rollout.verdict is None else rollout.verdict.to_dict()
    if verdict is not None:
        del verdict["evidence"]
    made = {column: plain(getattr(rollout, name)) for column, name in _OF_ROLLOUT.items()}
    made |= {
        "schema_version": SCHEMA,
        "run": run,
        "phase": stored.place["phase"],
        "step": stored.step,
        "group_id": item.group_id,
        "task_set": rollout.task_set,
        "advantage": item.advantage,
        "used": item.reason,
        "outcome": verdict and verdict["outcome"],
        "verdict": verdict,
        "messages": stored.messages,
        "files": {path: _file_record(entry) for path, entry in rollout.changed.items()},
        "ledger": rollout.trajectory.ledger.to_dict(),
        "place": dict(stored.place),
        "state": dict(stored.state),
        "attempts": [dict(attempt) for attempt in stored.attempts],
        "drifts": plain(rollout.trajectory.drifts),
        "temperature": temperature,
        "session": next((s.rollout_id for s in segments if s.rollout_id != rollout.id), None),
        "rows": len(segments),
        "turns": heads,
        "ids": ids,
        "logprobs": logprobs,
    }
    return {column: made[column] for column in ROLLOUTS}


def _file_record(entry: FileEntry) -> Record:
    try:
        content = {"text": entry.content.decode()}
    except UnicodeDecodeError:
        content = {"base64": base64.b64encode(entry.content).decode()}
    return content | {"executable": entry.executable}


def _turn_heads(trajectory: Trajectory) -> tuple[list[Record], IntArray, FloatArray]:
    """Return the turns without arrays, and the ids and log-probabilities of those that no row holds."""
    places = _places_in_rows(trajectory)
    heads: list[Record] = []
    ids: list[IntArray] = []
    logprobs: list[FloatArray] = []
    for turn in trajectory.turns:
        row, start = places.get(turn.index, (-1, 0))
        if row < 0:
            ids += [turn.context_ids, turn.ids]
        of = "none" if turn.logprobs is None else "own"
        if row >= 0 and turn.logprobs is not None:
            segment, first = trajectory.segments[row], start + len(turn.context_ids)
            span = slice(first, first + len(turn.ids))
            if segment.mask[span].all() and _same_bits(segment.logprobs[span], turn.logprobs):
                of = "row"
        if of == "own" and turn.logprobs is not None:
            logprobs.append(turn.logprobs)
        sizes = {"context": len(turn.context_ids), "sampled": len(turn.ids)}
        times = {"times": turn.times.to_dict()}
        heads.append({**head(turn, "times"), **sizes, "row": row, "start": start, "logprobs": of, **times})
    return heads, _joined(ids, np.int32), _joined(logprobs, np.float32)


def _places_in_rows(trajectory: Trajectory) -> dict[int, tuple[int, int]]:
    """Return turn -> (position of the first segment with its ids, where its new prompt ids start there)."""
    turns = by_index(trajectory.turns)
    ends = chain_ends(turns)
    found: dict[int, tuple[int, int]] = {}
    if len(ends) != len(trajectory.segments):
        return found
    for position, (end, segment) in enumerate(zip(ends, trajectory.segments, strict=True)):
        start = 0
        for turn in chain_of(turns, end):
            middle = start + len(turn.context_ids)
            stop = middle + len(turn.ids)
            if turn.index not in found and (
                _same_bits(segment.ids[start:middle], turn.context_ids)
                and _same_bits(segment.ids[middle:stop], turn.ids)
            ):
                found[turn.index] = (position, start)
            start = stop
    return found


def _same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _joined(parts: Sequence[np.ndarray[Any, Any]], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def read_rollout(record: Record, rows: Sequence[Record]) -> ReadRollout:
    """Return the rollout of a record and its row records. Raises RecordError when they do not fit."""
    rollout_id = str(record.get("rollout_id"))
    try:
        if len(rows) != record["rows"] or any(row["rollout_id"] != rollout_id for row in rows):
            raise RecordError(
                f"rollout {rollout_id}: {record['rows']} rows are expected, {len(rows)} are there"
            )
        segments = tuple(_segment(record["session"] or rollout_id, row) for row in rows)
        rollout = _rollout(record, segments)
        # The tokens must be those of the account.
        choose_rows(rollout, RowRules())
        return ReadRollout(
            rollout=rollout, place=record["place"], state=record["state"], attempts=record["attempts"]
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RecordError(f"rollout {rollout_id} cannot be read: {error!r}") from error
    except TrainError as error:
        raise RecordError(str(error)) from error


def _segment(session: str, row: Record) -> Segment:
    arrays = {name: row[name] for name in ("ids", "mask", "logprobs", "versions")}
    if len({len(array) for array in arrays.values()}) != 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise RecordError(
            f"rollout {row['rollout_id']} segment {row['segment']}: lists differ in length: {lengths}"
        )
    if arrays["ids"].min(initial=0) < 0:
        raise RecordError(f"rollout {row['rollout_id']} segment {row['segment']}: an id is below 0")
    experts = None if row.get("experts") is None else np.load(io.BytesIO(base64.b64decode(row["experts"])))
    if experts is not None and experts.shape[:1] != arrays["ids"].shape:
        raise RecordError(
            f"rollout {row['rollout_id']} segment {row['segment']}: experts of {len(experts)} tokens, ids of"
            f" {len(arrays['ids'])}"
        )
    found = {name: row[column] for column, name in _OF_SEGMENT.items() if column in row}
    return pick(Segment, found, rollout_id=session, experts=experts)


def _npy(array: ExpertArray) -> str:
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getvalue()).decode()


def _rollout(record: Record, segments: tuple[Segment, ...]) -> Rollout:
    found = {name: record[column] for column, name in _OF_ROLLOUT.items() if column in record}
    return pick(
        Rollout,
        found,
        part=record["place"].get("part", ""),
        trajectory=pick(Trajectory, record, segments=segments, turns=_turns(record, segments)),
        verdict=None if record["verdict"] is None else read(Verdict, record["verdict"]),
        changed={path: _file(entry) for path, entry in record["files"].items()},
    )


def _file(entry: Mapping[str, Any]) -> FileEntry:
    content = entry["text"].encode() if "text" in entry else base64.b64decode(entry["base64"])
    return FileEntry(content=content, executable=entry["executable"])


def _turns(record: Record, segments: Sequence[Segment]) -> tuple[Turn, ...]:
    at = at_logprob = 0
    turns = []
    for one in record["turns"]:
        context, sampled = one["context"], one["sampled"]
        source, start = (segments[one["row"]].ids, one["start"]) if one["row"] >= 0 else (record["ids"], at)
        at += context + sampled if one["row"] < 0 else 0
        middle, stop = start + context, start + context + sampled
        logprobs: FloatArray | None = None
        if one["logprobs"] == "row":
            logprobs = segments[one["row"]].logprobs[middle:stop]
        elif one["logprobs"] == "own":
            logprobs = record["logprobs"][at_logprob : at_logprob + sampled]
            at_logprob += sampled
        if stop > len(source) or (logprobs is not None and len(logprobs) != sampled):
            raise RecordError(f"rollout {record['rollout_id']} turn {one['index']}: tokens are missing")
        turns.append(
            pick(Turn, one, context_ids=source[start:middle], ids=source[middle:stop], logprobs=logprobs)
        )
    return tuple(turns)
