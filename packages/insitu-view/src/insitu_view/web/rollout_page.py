"""What the pages of one rollout show: head, transcript, files, log, raw rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from insitu.chat.message_text import MAX_CHARS, clamped
from insitu.errors import RecordError
from insitu.storage import queries as sql
from insitu.storage.logs import MAX_LOG_BYTES
from insitu.storage.queries import RunReader
from insitu.storage.run_dir import KIND
from insitu_train.words import Words, message_spans
from insitu_view.web.credit import Credits
from insitu_view.web.runs import RunHandle, open_inside
from insitu_view.web.token_page import Span, row_spans

MAX_TURNS = 100
"""Turns of one page of a transcript."""
MAX_PAGE_CHARS = 3 << 20
"""Characters after which a page of a transcript ends."""
MAX_FILE_CHARS = 256 << 10
MAX_ARTIFACTS = 500
MAX_DOWNLOAD_BYTES = 64 << 20


def rollout_page(run: RunHandle, credits: Credits, rollout_id: str) -> dict[str, Any]:
    """Return the head of one rollout, decided or under way; raise RecordError for an unknown id."""
    with run.reader() as reader:
        state = reader.one(sql.STATE, id=rollout_id)
        row = next(iter(reader.rows(sql.ONE_ROW, id=rollout_id)), None)
        if state is None and row is None:
            raise RecordError(f"the run has no rollout {rollout_id}")
        found: dict[str, Any] = {"id": rollout_id, "state": state, "row": row}
        attempts = [sql.read_attempt(attempt) for attempt in reader.all(sql.ATTEMPTS, id=rollout_id)]
        found["attempts"] = attempts
        if row is not None:
            found |= _decided(run, reader, row)
            own = next((a for a in attempts if a["attempt"] == row["attempt"]), {"began_s": None})
            found["began_s"] = own["began_s"] or row["ended_s"] - row["total_s"]
            found["neighbours"] = neighbours(reader, row)
    found["has"] = {
        "log": (run.path / "logs" / _log_name(rollout_id)).is_file(),
        "artifacts": bool(_artifact_paths(run, rollout_id, most=1)),
        "times": any(turn["began_s"] for turn in found.get("turns", ())),
    }
    account = None if row is None else row["account"]
    found["credit"] = None if account is None else credits.of(run, account).of(rollout_id)
    return found


def _decided(run: RunHandle, reader: RunReader, row: dict[str, Any]) -> dict[str, Any]:
    rollout_id = row["id"]
    stored = reader.one(sql.ROLLOUT, id=rollout_id) or {}
    notes = reader.one(sql.NOTES, id=rollout_id)
    heads, segments = reader.all(sql.TURN_HEADS, id=rollout_id), reader.all(sql.SEGMENT_HEADS, id=rollout_id)
    served = reader.meta().get(KIND) == "serve"
    hints = [] if notes is None else orjson.loads(notes["hints"])
    labels = {turn: _labels(pairs) for turn, pairs, *_ in hints}
    spans = row_spans(heads, segments)
    for segment, held in zip(segments, spans, strict=True):
        segment["turns"] = [span.turn for span in held]
        segment["sampled"] = held[0].sampled if held else 0
        segment["spans"] = _spans(reader, segment, held)
    return {
        "agent": "" if served else run.config().agent_of(stored["part"] or ""),
        "components": orjson.loads(stored["components"]),
        "deleted": orjson.loads(stored["deleted"]),
        "verdict": _verdict(reader.one(sql.VERDICT, id=rollout_id)),
        "turns": [
            {
                **_turn(head),
                **_lane(head["turn"], segments),
                "labels": labels.get(head["turn"], []),
                "waited_s": waited,
            }
            for head, waited in zip(heads, tool_waits(heads), strict=True)
        ],
        "waits": waits(row, heads),
        "segments": segments,
        "files": reader.all(sql.FILES, id=rollout_id),
        "drifts": [] if notes is None else orjson.loads(notes["drifts"]),
        "hints": hints,
    }


def _spans(reader: RunReader, segment: dict[str, Any], held: list[Span]) -> list[list[int]]:
    """Return turn, start, first sampled token, end and number of masked-in tokens of each turn of a row."""
    if not held:
        return []
    raw = reader.window("segments", "mask", segment["row"], 0, segment["tokens"])
    mask = np.frombuffer(raw, dtype=np.uint8)
    return [[s.turn, s.start, s.sampled, s.stop, int(mask[s.sampled : s.stop].sum())] for s in held]


def _labels(hints: list[list[str]]) -> list[str]:
    """Return the gateway's labels of a turn, and what a hook on tool calls did to its new results."""
    marks = {"label": "", "hook": "hook: "}
    return [marks[name] + value for name, value in hints if name in marks]


def _turn(head: dict[str, Any]) -> dict[str, Any]:
    return {**head, "version_runs": orjson.loads(head["version_runs"])}


def tool_waits(heads: list[dict[str, Any]]) -> list[float | None]:
    """Return for each turn the seconds since the reply it continues: the agent and its tools."""
    ended = {head["turn"]: head["ended_s"] for head in heads}
    befores = [ended.get(head["parent"]) for head in heads]
    return [
        None if before is None or head["began_s"] is None else max(0.0, head["began_s"] - before)
        for head, before in zip(heads, befores, strict=True)
    ]


def waits(row: dict[str, Any], heads: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a rollout waited for, in seconds, and the longest waits; None without recorded times."""
    timed = sorted(
        (head["began_s"], head["ended_s"], head["turn"]) for head in heads if head["began_s"] is not None
    )
    if not timed:
        return None
    sampling_s, until = 0.0, 0.0
    for began_s, ended_s, _ in timed:  # parallel calls count once
        sampling_s += max(0.0, ended_s - max(began_s, until))
        until = max(until, ended_s)
    parts = [{"turn": turn, "kind": "model", "s": ended_s - began_s} for began_s, ended_s, turn in timed]
    parts += [
        {"turn": head["turn"], "kind": "tools", "s": waited}
        for head, waited in zip(heads, tool_waits(heads), strict=True)
        if waited is not None
    ]
    return {
        "queued_s": row["queued_s"],
        "sampling_s": sampling_s,
        "tools_s": max(0.0, row["agent_s"] - sampling_s),
        "grade_s": row["grade_s"],
        "longest": sorted(parts, key=lambda part: -part["s"])[:5],
    }


def _lane(turn: int, segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the segments that hold a turn, and its label: of the final row if it is in that one."""
    held = [segment for segment in segments if turn in segment["turns"]]
    final = next((s for s in held if s["label"] == "final"), held[0] if held else None)
    return {"segments": [s["segment"] for s in held], "label": "" if final is None else final["label"]}


def _verdict(row: dict[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    (fixed, to_fix), (kept, to_keep) = orjson.loads(row["tests"])
    found = {key: value for key, value in row.items() if key not in ("tests", "schema_version", "rollout_id")}
    found["dropped_paths"] = orjson.loads(row["dropped_paths"])
    found["evidence"] = None if row["evidence"] is None else orjson.loads(row["evidence"])
    return {**found, "fail_to_pass": [fixed, to_fix], "pass_to_pass": [kept, to_keep]}


def neighbours(reader: RunReader, row: dict[str, Any]) -> dict[str, Any]:
    """Return ids around a rollout: in storage order, in its group, and of the same task at other steps."""
    group = reader.all(sql.GROUP_STATES, phase=row["phase"], step=row["step"], group=row["group"])
    same = reader.all(sql.SAME_TASK, **{name: row[name] for name in ("task", "task_set", "phase")})
    earlier = [other["id"] for other in same if other["step"] < row["step"]]
    later = [other["id"] for other in same if other["step"] > row["step"]]
    older, newer = reader.one(sql.PREVIOUS_ROW, row=row["row"]), reader.one(sql.NEXT_ROW, row=row["row"])
    return {
        "previous": older["id"] if older else None,
        "next": newer["id"] if newer else None,
        "group": [member["id"] for member in group],
        "earlier": earlier[-1] if earlier else None,
        "later": later[0] if later else None,
    }


def transcript(
    run: RunHandle, words: Words | None, rollout_id: str, start: int, count: int, chars: int
) -> dict[str, Any]:
    """Return turns as text: their new messages and the reply. `chars`: characters sent of each text."""
    with run.reader() as reader:
        turns = reader.all(sql.TURN_IDS, id=rollout_id, start=start, count=min(count, MAX_TURNS))
        heads = reader.all(sql.TURN_HEADS, id=rollout_id)
    timed = {
        head["turn"]: {name: head[name] for name in sql.TIMES} | {"waited_s": waited}
        for head, waited in zip(heads, tool_waits(heads), strict=True)
    }
    shown, size = [], 0
    for turn in turns:
        context = np.frombuffer(turn["context_ids"], dtype="<i4")
        ids = np.frombuffer(turn["ids"], dtype="<i4")
        messages = [] if words is None else words.messages(context, chars, message_spans(turn))
        reply = None if words is None else words.reply(ids, turn["finish"], chars)
        place = {"turn": turn["turn"], "parent": turn["parent"], **timed[turn["turn"]]}
        shown.append({**place, "messages": messages, "reply": reply})
        size += sum(len(message["text"]) for message in messages)
        if reply is not None:
            size += sum(len(call["text"]) for call in reply["calls"]) + len(reply["text"]["text"])
        if size > MAX_PAGE_CHARS:
            break
    after = start + len(shown)
    return {"id": rollout_id, "turns": shown, "next": after if after < len(heads) else None}


def diff_page(run: RunHandle, rollout_id: str) -> dict[str, Any]:
    """Return the changed files; `diff` is the judged diff where it was recorded."""
    with run.reader() as reader:
        stored = reader.one(sql.ROLLOUT, id=rollout_id)
        if stored is None:
            raise RecordError(f"the run has no rollout {rollout_id}")
        verdict = reader.one(sql.VERDICT, id=rollout_id)
        files = []
        for head in reader.all(sql.FILES, id=rollout_id):
            held = reader.one(sql.FILE, id=rollout_id, path=head["path"])
            files.append({**head, **_file_text(b"" if held is None else held["content"])})
        diff = reader.one(sql.DIFF, id=rollout_id)
    return {
        "id": rollout_id,
        "diff": None if diff is None else diff["text"],
        "files": files,
        "deleted": orjson.loads(stored["deleted"]),
        "dropped": [] if verdict is None else orjson.loads(verdict["dropped_paths"]),
    }


def _file_text(content: bytes) -> dict[str, Any]:
    if b"\0" in content[:8192]:
        return {"text": None, "chars": 0, "lines": 0}
    return clamped(content.decode("utf-8", "replace"), MAX_FILE_CHARS)


def changed_file(run: RunHandle, rollout_id: str, path: str) -> bytes:
    """Return the content of a changed file. Raises RecordError when the rollout has none at this path."""
    with run.reader() as reader:
        held = reader.one(sql.FILE, id=rollout_id, path=path)
    if held is None:
        raise RecordError("the rollout changed no such file")
    return bytes(held["content"])


def log_page(run: RunHandle, rollout_id: str) -> dict[str, Any]:
    """Return the kept output of the agent, all attempts together; `text` is null when there is none."""
    logs = run.path / "logs"
    try:
        raw, size = open_inside(run.path, logs / _log_name(rollout_id), MAX_LOG_BYTES)
    except RecordError:
        return {"id": rollout_id, "text": None, "chars": 0, "lines": 0, "bytes": 0}
    return {"id": rollout_id, "bytes": size, **clamped(raw.decode("utf-8", "replace"), MAX_LOG_BYTES)}


def run_log(run: RunHandle) -> dict[str, Any]:
    """Return the end of insitu's own log."""
    try:
        raw, size = open_inside(run.path, run.path / "logs" / "insitu.log", 8 << 20)
    except RecordError:
        return {"text": "", "chars": 0, "lines": 0, "bytes": 0}
    text = raw[-MAX_LOG_BYTES:].decode("utf-8", "replace")
    return {"bytes": size, **clamped(text, MAX_LOG_BYTES)}


def raw_page(run: RunHandle, rollout_id: str) -> dict[str, Any]:
    """Return the stored rows of a rollout without token arrays."""
    with run.reader() as reader:
        stored = reader.one(sql.ROLLOUT, id=rollout_id)
        return {
            "rollout": stored,
            "state": reader.one(sql.STATE, id=rollout_id),
            "verdict": reader.one(sql.VERDICT, id=rollout_id),
            "attempts": reader.all(sql.ATTEMPTS, id=rollout_id),
            "turns": reader.all(sql.TURN_HEADS, id=rollout_id),
            "segments": reader.all(sql.SEGMENT_HEADS, id=rollout_id),
            "files": reader.all(sql.FILES, id=rollout_id),
            "notes": reader.one(sql.NOTES, id=rollout_id),
        }


def artifacts(run: RunHandle, rollout_id: str) -> dict[str, Any]:
    """Return the files that were collected from the agent's sandbox."""
    paths = _artifact_paths(run, rollout_id, most=MAX_ARTIFACTS)
    return {
        "id": rollout_id,
        "artifacts": [{"path": name, "size": size} for name, (_, size) in paths.items()],
    }


def artifact(run: RunHandle, rollout_id: str, path: str) -> bytes:
    """Return one collected file. Raises RecordError when it is not among those listed."""
    found = _artifact_paths(run, rollout_id, most=MAX_ARTIFACTS).get(path)
    if found is None:
        raise RecordError("the rollout has no such artifact")
    return open_inside(run.path, found[0], MAX_DOWNLOAD_BYTES)[0]


def _artifact_paths(run: RunHandle, rollout_id: str, *, most: int) -> dict[str, tuple[Path, int]]:
    """Return `attempt/path` -> (file, size) of regular files; links are not followed."""
    name = rollout_id.replace("/", "-")
    root = run.path / "artifacts" / name
    found: dict[str, tuple[Path, int]] = {}
    if not name or name.startswith("."):
        return found
    for folder, _, files in os.walk(root, followlinks=False):
        for file in sorted(files):
            path = Path(folder) / file
            if path.is_symlink() or not path.is_file():
                continue
            found[path.relative_to(root).as_posix()] = (path, path.stat().st_size)
            if len(found) >= most:
                return found
    return found


def _log_name(rollout_id: str) -> str:
    return rollout_id.replace("/", "-") + ".log"


DEFAULT_CHARS = MAX_CHARS
