"""How a stored rollout ended, without its tokens and files: what reports over many of them are made of."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import orjson

from insitu.types import Outcome, Status, Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """One decided rollout."""

    rollout_id: str
    group: int
    slot: int
    task_id: str
    task_hash: str
    """Of the task as it was graded; empty when it was not."""
    category: str
    status: Status
    outcome: Outcome | None
    """None = not graded."""
    reward: float | None
    trust: str
    attempt: int
    error: str
    reason: str
    timings: Timings
    calls: int
    """Model calls whose tokens are stored."""
    prompt_tokens: int
    """Summed over those calls, each with its whole prompt."""
    sampled_tokens: int
    egress_attempts: int | None
    """What of its sandbox tried to get out; None = not known."""


_ROLLOUTS = (
    "SELECT r.*, v.outcome, v.trust, v.reason, v.task_hash FROM rollouts r"
    " LEFT JOIN verdicts v USING (rollout_id) WHERE r.phase = ? AND r.step = ? ORDER BY r.group_no, r.slot"
)
_CALLS = (
    "SELECT t.turn, t.parent, length(t.context_ids) / 4 AS fresh, length(t.ids) / 4 AS sampled"
    " FROM turns t WHERE t.rollout_id = ? ORDER BY t.position"
)


def read_outlines(db: sqlite3.Connection, phase: str, step: int) -> list[Outline]:
    """By (group, slot)."""
    return [_outline(db, row) for row in db.execute(_ROLLOUTS, (phase, step)).fetchall()]


def _outline(db: sqlite3.Connection, row: sqlite3.Row) -> Outline:
    calls, prompt, sampled = _sizes(db, row["rollout_id"])
    return Outline(
        rollout_id=row["rollout_id"],
        group=row["group_no"],
        slot=row["slot"],
        task_id=row["task_id"],
        task_hash=row["task_hash"] or "",
        category=row["category"],
        status=Status(row["status"]),
        outcome=None if row["outcome"] is None else Outcome(row["outcome"]),
        reward=row["reward"],
        trust=row["trust"] or "",
        attempt=row["attempt"],
        error=row["error"],
        reason=row["reason"] or "",
        timings=Timings(**orjson.loads(row["timings"])),
        calls=calls,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        egress_attempts=row["egress"],
    )


def _sizes(db: sqlite3.Connection, rollout_id: str) -> tuple[int, int, int]:
    """(calls, prompt tokens, sampled tokens): a prompt is its parent's prompt, reply and what is new."""
    ends: dict[int, int] = {-1: 0}
    calls = prompts = sampled = 0
    for row in db.execute(_CALLS, (rollout_id,)):
        prompt = ends.get(row["parent"], 0) + row["fresh"]
        ends[row["turn"]] = prompt + row["sampled"]
        calls, prompts, sampled = calls + 1, prompts + prompt, sampled + row["sampled"]
    return calls, prompts, sampled
