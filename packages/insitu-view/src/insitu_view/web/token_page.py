"""A window of tokens as one binary answer, and the minimap of a whole row.

    u32 header length | header (JSON, padded to 4 bytes) | arrays | text (UTF-8)

The header names every array with its type, offset behind the header, and length.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from insitu.errors import RecordError
from insitu.storage.queries import ONE_STEP, SEGMENT_HEADS, STATE, TURN_HEADS, TURN_ROWS, RunReader
from insitu.storage.run_dir import SCORES
from insitu.types import Turn
from insitu_train.branches import by_index, chain_ends, chain_of
from insitu_train.scores import RowScores, read_row
from insitu_train.words import Words

MAX_TOKENS = 8192
BUCKETS = 2000
TRAINED, CONTEXT, OTHER_ROW = "trained", "context", "trained in another row"
_TYPES = {"uint32": "u32", "int32": "i32", "float32": "f32", "uint8": "u8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sampled tokens of one turn inside a row."""

    turn: int
    start: int
    sampled: int
    """Where its sampled tokens begin; new prompt tokens stand before."""
    stop: int
    excluded: str


def head_turns(heads: list[dict[str, Any]]) -> dict[int, Turn]:
    """Return turns whose arrays have the right lengths and no content."""
    empty = np.zeros(1, dtype=np.int32)
    return by_index(
        [
            Turn(
                index=head["turn"],
                parent=head["parent"],
                context_ids=np.broadcast_to(empty, head["fresh"]),
                ids=np.broadcast_to(empty, head["sampled"]),
                logprobs=None,
                finish=head["finish"],
                version_runs=(),
                excluded=head["excluded"],
            )
            for head in heads
        ]
    )


def row_spans(heads: list[dict[str, Any]], segments: list[dict[str, Any]]) -> list[list[Span]]:
    """Return the turns of each segment in the order of its tokens; empty where they do not add up."""
    turns = head_turns(heads)
    ends = chain_ends(turns)
    found: list[list[Span]] = []
    for number, segment in enumerate(segments):
        path = chain_of(turns, ends[number]) if len(ends) == len(segments) else []
        spans: list[Span] = []
        start = 0
        for turn in path:
            sampled = start + len(turn.context_ids)
            stop = sampled + len(turn.ids)
            spans.append(
                Span(turn=turn.index, start=start, sampled=sampled, stop=stop, excluded=turn.excluded)
            )
            start = stop
        found.append(spans if start == segment["tokens"] else [])
    return found


def token_page(
    reader: RunReader, words: Words | None, rollout_id: str, segment: int, start: int, count: int
) -> bytes:
    """Return a window of a segment. Raises RecordError when there is no such segment."""
    segments = reader.all(SEGMENT_HEADS, id=rollout_id)
    head = _segment(segments, segment)
    count = max(0, min(count, MAX_TOKENS, head["tokens"] - start))
    ids = np.frombuffer(reader.window("segments", "ids", head["row"], 4 * start, 4 * count), dtype="<i4")
    known = np.frombuffer(reader.window("segments", "mask", head["row"], 0, start + count), dtype=np.uint8)
    mask = known[start:]
    before, inside = int(known[:start].sum()), int(mask.sum())
    logprobs = np.full(count, np.nan, dtype=np.float32)
    versions = np.full(count, -1, dtype=np.int32)
    for name, array, dtype in (("logprobs", logprobs, "<f4"), ("versions", versions, "<i4")):
        raw = reader.window("segments", name, head["row"], 4 * before, 4 * inside)
        array[mask.astype(bool)] = np.frombuffer(raw, dtype=dtype)
    spans = row_spans(reader.all(TURN_HEADS, id=rollout_id), segments)[segments.index(head)]
    turns, reasons, names = _fates(spans, mask, start, _fate(reader, rollout_id, head["kind"]))
    arrays = {
        "id": ids,
        "turn": turns,
        "version": versions,
        "logprob": logprobs,
        "mask": mask,
        "reason": reasons,
    }
    scores, unscored = _row_scores(reader, rollout_id, segment)
    if scores is not None:
        arrays |= _window(scores, start, count)
    info = {
        "rollout": rollout_id, "segment": segment, "start": start, "count": count, "total": head["tokens"],
        "label": head["label"], "kind": head["kind"], "reasons": names, "unscored": unscored,
    }  # fmt: skip
    return encode(info, arrays, words, ids)


def _row_scores(reader: RunReader, rollout_id: str, segment: int) -> tuple[RowScores | None, str]:
    """Return the trainer's scores of a row, or None and why there are none."""
    state = reader.one(STATE, id=rollout_id)
    step = None if state is None else reader.one(ONE_STEP, step=state["account"])
    if step is None:
        return None, "no committed step has trained this rollout"
    try:
        folder = reader.run_dir / SCORES
        return read_row(folder, step["step"], step["plan_hash"], rollout_id, segment), ""
    except RecordError as error:
        return None, str(error)


def _window(scores: RowScores, start: int, count: int) -> dict[str, npt.NDArray[Any]]:
    """Return gap and entropy (NaN = not trained) and flags of the tokens of a window."""
    at = np.flatnonzero(scores.mask[start : start + count])
    first = int(scores.mask[:start].sum())
    found: dict[str, npt.NDArray[Any]] = {
        "gap": np.full(count, np.nan, np.float32),
        "entropy": np.full(count, np.nan, np.float32),
        "flags": np.zeros(count, np.uint8),
    }
    for name, array in found.items():
        array[at] = getattr(scores, name)[first : first + len(at)]
    return found


def turn_page(
    reader: RunReader, words: Words | None, rollout_id: str, turn: int, start: int, count: int
) -> bytes:
    """Return a window of one turn: its new prompt tokens, then its sampled ones."""
    heads = {head["turn"]: head for head in reader.all(TURN_HEADS, id=rollout_id)}
    row = reader.one(TURN_ROWS, id=rollout_id, turn=turn)
    if row is None or turn not in heads:
        raise RecordError(f"rollout {rollout_id} has no turn {turn}")
    head = heads[turn]
    total = head["fresh"] + head["sampled"]
    count = max(0, min(count, MAX_TOKENS, total - start))
    of_context = max(0, min(count, head["fresh"] - start))
    at = max(0, start - head["fresh"])
    raw = reader.window("turns", "context_ids", row["row"], 4 * start, 4 * of_context)
    raw += reader.window("turns", "ids", row["row"], 4 * at, 4 * (count - of_context))
    ids = np.frombuffer(raw, dtype="<i4")
    mask = (np.arange(count) >= of_context).astype(np.uint8)
    logprobs = np.full(count, np.nan, dtype=np.float32)
    if head["has_logprobs"]:
        found = reader.window("turns", "logprobs", row["row"], 4 * at, 4 * (count - of_context))
        logprobs[of_context:] = np.frombuffer(found, dtype="<f4")
    versions = np.full(count, -1, dtype=np.int32)
    for first, version in orjson.loads(head["version_runs"]):
        versions[max(of_context, head["fresh"] + first - start) :] = version
    fate = head["excluded"] or _fate(reader, rollout_id, "sampled")
    reasons = np.where(mask, 1, 0).astype(np.uint8)
    arrays = {
        "id": ids,
        "turn": np.full(count, turn, dtype=np.int32),
        "version": versions,
        "logprob": logprobs,
        "mask": mask if not head["excluded"] else np.zeros_like(mask),
        "reason": reasons,
    }
    info = {
        "rollout": rollout_id, "turn": turn, "start": start, "count": count, "total": total, "label": "",
        "kind": "sampled", "reasons": [CONTEXT, fate], "unscored": "recorded for segments, not for turns",
    }  # fmt: skip
    return encode(info, arrays, words, ids)


def encode(
    info: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]],
    words: Words | None,
    ids: npt.NDArray[np.int32],
) -> bytes:
    """Return one answer of header, arrays and text; without a decoder the text is empty."""
    text, ends = ("", []) if words is None else words.pieces(ids)
    parts = {**arrays, "end": np.array(ends, dtype=np.uint32)}
    body, listed, at = [], [], 0
    # Widest first, so that every array begins at a multiple of its width.
    for name, array in sorted(parts.items(), key=lambda item: -item[1].itemsize):
        raw = array.tobytes()
        listed.append({"name": name, "type": _TYPES[str(array.dtype)], "offset": at, "length": len(array)})
        body.append(raw)
        at += len(raw)
    encoded = text.encode("utf-8", "replace")
    header = orjson.dumps({**info, "arrays": listed, "text": {"offset": at, "bytes": len(encoded)}})
    header += b" " * (-len(header) % 4)
    return b"".join([struct.pack("<I", len(header)), header, *body, encoded])


def decode(body: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]], list[str]]:
    """Return header, arrays and the text of each token of an answer of `encode`."""
    base = 4 + struct.unpack_from("<I", body)[0]
    header = orjson.loads(body[4:base])
    types = {short: np.dtype(name) for name, short in _TYPES.items()}
    arrays = {
        array["name"]: np.frombuffer(body, types[array["type"]], array["length"], base + array["offset"])
        for array in header["arrays"]
    }
    at = base + header["text"]["offset"]
    ends = arrays["end"].tolist()
    wide = body[at : at + header["text"]["bytes"]].decode().encode("utf-16-le", "surrogatepass")
    texts = [
        wide[2 * start : 2 * stop].decode("utf-16-le", "replace")
        for start, stop in zip([0, *ends], ends, strict=False)
    ]
    return header, arrays, texts


def minimap(reader: RunReader, rollout_id: str, segment: int) -> dict[str, Any]:
    """Return a whole row in at most BUCKETS buckets: share of masked tokens, extremes, turns."""
    segments = reader.all(SEGMENT_HEADS, id=rollout_id)
    head = _segment(segments, segment)
    total = head["tokens"]
    mask = np.frombuffer(reader.window("segments", "mask", head["row"], 0, total), dtype=np.uint8)
    raw = reader.window("segments", "logprobs", head["row"], 0, 4 * head["logprobs"])
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[mask.astype(bool)] = np.frombuffer(raw, dtype="<f4")
    edges = np.linspace(0, total, min(BUCKETS, total) + 1).astype(np.int64)[:-1]
    spans = row_spans(reader.all(TURN_HEADS, id=rollout_id), segments)[segments.index(head)]
    counts = np.diff([*edges, total])
    shares = np.add.reduceat(mask.astype(np.int64), edges) / counts if total else np.zeros(0)
    lowest = np.minimum.reduceat(logprobs, edges) if total else np.zeros(0)
    return {
        "rollout": rollout_id,
        "segment": segment,
        "tokens": total,
        "edges": edges.tolist(),
        "masked": [round(float(share), 4) for share in shares],
        "min_logprob": [round(float(value), 4) for value in lowest],
        "max_gap": _largest_gaps(_row_scores(reader, rollout_id, segment)[0], edges, total),
        "turns": [
            {"turn": s.turn, "start": s.start, "sampled": s.sampled, "stop": s.stop, "excluded": s.excluded}
            for s in spans
        ],
    }


def _largest_gaps(
    scores: RowScores | None, edges: npt.NDArray[np.int64], total: int
) -> list[float | None] | None:
    """Return the largest |gap| of each bucket, None for one without trained tokens; None without scores."""
    if scores is None:
        return None
    gaps = np.full(total, -1.0, np.float32)
    gaps[np.flatnonzero(scores.mask)] = np.abs(scores.gap)
    return [float(f"{v:.4g}") if v >= 0 else None for v in np.maximum.reduceat(gaps, edges).tolist()]


def _segment(segments: list[dict[str, Any]], index: int) -> dict[str, Any]:
    for head in segments:
        if head["segment"] == index:
            return head
    raise RecordError(f"the rollout has no segment {index}")


def _fate(reader: RunReader, rollout_id: str, kind: str) -> str:
    """Return what became of the masked tokens of a rollout: trained, or why not."""
    state = reader.one(STATE, id=rollout_id)
    if kind == "demonstrated":
        return "demonstrated"
    if state is None:
        return "unknown"
    return TRAINED if state["state"] == "trained" else str(state["reason"] or f"pending ({state['state']})")


def _fates(
    spans: list[Span], mask: npt.NDArray[np.uint8], start: int, fate: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], list[str]]:
    """Return turn and reason of every token of a window, and the names of the reasons."""
    names = [CONTEXT, fate, OTHER_ROW]
    turns = np.full(len(mask), -1, dtype=np.int32)
    reasons = np.zeros(len(mask), dtype=np.uint8)
    for span in spans:
        turns[max(0, span.start - start) : max(0, span.stop - start)] = span.turn
        if span.excluded and span.excluded not in names:
            names.append(span.excluded)
        reason = names.index(span.excluded or OTHER_ROW)
        reasons[max(0, span.sampled - start) : max(0, span.stop - start)] = reason
    reasons[mask.astype(bool)] = 1
    return turns, reasons, names
