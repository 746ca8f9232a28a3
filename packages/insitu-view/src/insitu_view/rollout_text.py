"""One rollout as text for a terminal, from the same functions as the viewer's rollout page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.errors import RecordError
from insitu.progress.base import duration, printable
from insitu.storage.queries import IDS, PAGE, STATE
from insitu_train.words import WordsCache
from insitu_view.web.credit import Credits
from insitu_view.web.rollout_page import MAX_TURNS, diff_page, rollout_page, transcript
from insitu_view.web.runs import RunHandle, one_run
from insitu_view.web.token_page import MAX_TOKENS, decode, token_page

_CHARS = 4000
"""Characters shown of one message."""
_HIDDEN = ("system",)
"""Roles whose messages are shown by their first line only."""


def newest(run: RunHandle, filters: Mapping[str, object], count: int) -> list[dict[str, Any]]:
    """Return the newest rollouts that pass the filters (`storage.queries.FILTERS`)."""
    with run.reader() as reader:
        return reader.page(filters, limit=min(count, PAGE)).rows


def newest_text(rows: Sequence[Mapping[str, Any]], none: str) -> Iterator[str]:
    """Yield one paragraph per rollout: id, task, and its verdict; `none` where there is no rollout."""
    if not rows:
        yield none
    several = len({row["task_set"] for row in rows}) > 1
    for row in rows:
        named = f", task set {row['task_set']}" if several else ""
        yield printable(f"{row['id']}  {row['task']}{named}")
        yield f"  {_verdict_line(row)}"


def rollout_found(run: RunHandle, rollout_id: str) -> dict[str, Any]:
    """Return the rollout page, its whole transcript and its diff. Raises RecordError for an unknown id."""
    with run.reader() as reader:
        if reader.one(STATE, id=rollout_id) is None:
            known = [row["id"] for row in reader.all(IDS)]
            close = difflib.get_close_matches(rollout_id, known, n=1, cutoff=0.5)
            hint = f"; did you mean {printable(close[0])}?" if close else ""
            raise RecordError(f"{run.name} has no rollout {printable(rollout_id)}{hint}")
    words, problem = WordsCache().of(run.config())
    turns: list[Any] = []
    at: int | None = 0
    while at is not None:
        page = transcript(run, words, rollout_id, at, MAX_TURNS, _CHARS)
        turns, at = turns + page["turns"], page["next"]
    found = rollout_page(run, Credits(), rollout_id)
    shown = diff_page(run, rollout_id) if found["row"] is not None else None
    return {**found, "transcript": turns, "problem": problem, "changes": shown}


def rollout_text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the verdict, the transcript by turn, and the times."""
    row = found["row"]
    yield printable(f"rollout {found['id']}")
    if row is None:
        yield printable(f"state: {found['state']['state']}; it has no verdict yet")
        return
    named = f", task set {row['task_set']}" if row["task_set"] else ""
    named += f", agent {found['agent']}" if found["agent"] else ""
    yield printable(f"task {row['task']}{named}, step {row['step']}, attempt {row['attempt']}")
    yield _verdict_line(row)
    yield from _checks(found["verdict"])
    yield _fate_line(row, found["credit"])
    if found["problem"]:
        yield printable(found["problem"])
    for turn, head in zip(found["transcript"], found["turns"], strict=False):
        yield from ("", *_turn(turn, head))
    yield from ("", *_times(row, found["waits"]))
    changed = [file["path"] for file in found["files"]] + [f"{path} (deleted)" for path in found["deleted"]]
    yield printable("changed: " + (", ".join(changed) or "nothing"))


def _verdict_line(row: Mapping[str, Any]) -> str:
    solved = row["reward"] is not None and row["reward"] >= 1.0
    parts = ["SOLVED" if solved else "NOT SOLVED", row["outcome"] or "not graded"]
    parts += [f"reward {row['reward']:g}"] if row["reward"] is not None else []
    parts += [f"{row['passed']} of {row['total']} checks"] if row["total"] else []
    parts += [row["status"]] if row["status"] != "ok" else []
    parts += [text for text in (row["reason"], row["error"]) if text]
    return printable(": ".join([parts[0], ", ".join(parts[1:])]))


def _checks(verdict: Mapping[str, Any] | None) -> Iterator[str]:
    if verdict is None:
        return
    for check in verdict["evidence"] or ():
        line = f"  {check['name']}: {check['outcome']}"
        if check["expected"] or check["got"]:
            line += f"; expected {check['expected']}" + (f", got {check['got']}" if check["got"] else "")
        yield printable(line)
        yield from _indented("    ", check["tail"])
    if verdict["dropped_paths"]:
        yield printable(f"  changes not judged (protected): {', '.join(verdict['dropped_paths'])}")


def _fate_line(row: Mapping[str, Any], credit: Mapping[str, Any] | None) -> str:
    line = f"{row['sampled']} tokens sampled, {row['trained']} trainable; {row['state'] or 'no state'}"
    line += f" ({row['fate']})" if row["fate"] else ""
    if credit is not None and credit["advantage"] is not None:
        line += f"; advantage {credit['advantage']:+.3f}, plan {credit['proof']}"
    return printable(line)


def _turn(turn: Mapping[str, Any], head: Mapping[str, Any]) -> Iterator[str]:
    took = "" if turn["began_s"] is None else f", {turn['ended_s'] - turn['began_s']:.1f} s"
    why = f", not trained: {head['excluded']}" if head["excluded"] else ""
    lane = f", {head['label']}" if head["label"] not in ("", "final") else ""
    lane += "".join(f", {label.replace('_', ' ')}" for label in head["labels"])
    yield printable(f"-- turn {turn['turn']}{lane}: {head['sampled']} tokens{took}{why}")
    for message in turn["messages"]:
        text = message["text"].partition("\n")[0] if message["role"] in _HIDDEN else message["text"]
        yield from _said(message["role"], text, message["chars"])
    reply = turn["reply"]
    if reply is None:
        return
    if reply["reasoning"]:
        yield from _said("thinks", reply["reasoning"]["text"], reply["reasoning"]["chars"])
    if reply["text"]["text"]:
        yield from _said("model", reply["text"]["text"], reply["text"]["chars"])
    for call in reply["calls"]:
        yield from _said("calls", f"{call['name']} {call['text']}", len(call["name"]) + 1 + call["chars"])


def _said(who: str, text: str, chars: int) -> Iterator[str]:
    yield from _indented(f"{printable(who):<7}| ", text)
    if chars > len(text):
        yield f"{'':<7}| ... {chars - len(text)} more characters"


def _indented(prefix: str, text: str) -> Iterator[str]:
    for line in text.strip("\n").split("\n") if text.strip() else ():
        yield prefix + printable(line.expandtabs(4))


def _times(row: Mapping[str, Any], waits: Mapping[str, Any] | None) -> Iterator[str]:
    parts = {"queue": row["queued_s"], "agent": row["agent_s"], "grading": row["grade_s"]}
    if waits is not None:
        parts = {"queue": row["queued_s"], "model": waits["sampling_s"], "agent and tools": waits["tools_s"]}
        parts["grading"] = row["grade_s"]
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    yield f"time: {duration(row['total_s'])} ({shown})"


def diff_text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the judged diff, or where it was not recorded the changed files."""
    changes = found["changes"]
    if changes is None:
        return
    if changes["diff"] is not None:
        yield from _indented("", changes["diff"])
        return
    yield "no diff was recorded; the changed files:"
    for file in changes["files"]:
        yield printable(f"-- {file['path']} ({file['size']} bytes)")
        yield from _indented("  ", file["text"] or "")


def tokens_of(run: RunHandle, rollout_id: str, segments: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield every token of the rows of a rollout: id, text, fate, turn, log-probability, version."""
    words, _ = WordsCache().of(run.config())
    with run.reader() as reader:
        for segment in segments:
            start, total = 0, 1
            while start < total:
                raw = token_page(reader, words, rollout_id, segment, start, MAX_TOKENS)
                info, columns, pieces = decode(raw)
                for n in range(info["count"]):
                    known = bool(columns["mask"][n])
                    yield {
                        "segment": segment,
                        "position": start + n,
                        "turn": int(columns["turn"][n]),
                        "id": int(columns["id"][n]),
                        "text": pieces[n] if pieces else "",
                        "fate": info["reasons"][columns["reason"][n]],
                        "logprob": float(columns["logprob"][n]) if known else None,
                        "version": int(columns["version"][n]) if known else None,
                    }
                start, total = start + MAX_TOKENS, info["total"]


def token_lines(tokens: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line per token."""
    yield f"row position turn {'id':>6} {'logprob':>8} {'version':>7}  {'fate':<20} text"
    for token in tokens:
        logprob = "-" if token["logprob"] is None else f"{token['logprob']:.3f}"
        version = "-" if token["version"] is None else token["version"]
        text = printable(repr(token["text"]))
        yield printable(
            f"{token['segment']:>3} {token['position']:>8} {token['turn']:>4} {token['id']:>6} {logprob:>8}"
            f" {version:>7}  {token['fate']:<20} {text}"
        )


def transcript_of(path: Path, rollout_id: str) -> Iterator[str]:
    """Yield a rollout as text by turn, its verdict first. Raises RecordError for an unknown id."""
    return rollout_text(rollout_found(one_run(path), rollout_id))


def diff_of(path: Path, rollout_id: str) -> Iterator[str]:
    """Yield the judged changes of a rollout. Raises RecordError for an unknown id."""
    return diff_text(rollout_found(one_run(path), rollout_id))
