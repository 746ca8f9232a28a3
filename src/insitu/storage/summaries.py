"""Summaries of stored rollouts for reports, without tokens and files."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import orjson

from insitu.storage.schema import TASK_SET
from insitu.types import Outcome, Status, Timings
from insitu.types.codec import read


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """Result and sizes of one decided rollout."""

    rollout_id: str
    group: int
    slot: int
    task_set: str
    part: str
    """`Task.part` of its task."""
    task_id: str
    task_hash: str
    """Hash of the task as graded; empty when not graded."""
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
    """Model calls with stored tokens."""
    prompt_tokens: int
    """Sum of the full prompt lengths of these calls."""
    sampled_tokens: int
    egress_attempts: int | None
    """Blocked outgoing connection attempts of its sandbox; None = unknown."""


_ROLLOUTS = (
    f"SELECT r.*, {TASK_SET} AS task_set, v.outcome, v.trust, v.reason, v.task_hash FROM rollouts r"
    " LEFT JOIN verdicts v USING (rollout_id) WHERE r.phase = ? AND r.step = ? ORDER BY r.group_no, r.slot"
)
_CALLS = (
    "SELECT t.turn, t.parent, length(t.context_ids) / 4 AS new, length(t.ids) / 4 AS sampled"
    " FROM turns t WHERE t.rollout_id = ? ORDER BY t.position"
)


def read_summaries(db: sqlite3.Connection, phase: str, step: int) -> list[RolloutSummary]:
    """Return the rollouts of one phase and step, ordered by (group, slot)."""
    return [_summary(db, row) for row in db.execute(_ROLLOUTS, (phase, step)).fetchall()]


def _summary(db: sqlite3.Connection, row: sqlite3.Row) -> RolloutSummary:
    calls, prompt, sampled = _sizes(db, row["rollout_id"])
    return RolloutSummary(
        rollout_id=row["rollout_id"],
        group=row["group_no"],
        slot=row["slot"],
        task_set=row["task_set"],
        part=row["part"] or "",
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
        timings=read(Timings, orjson.loads(row["timings"])),
        calls=calls,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        egress_attempts=row["egress"],
    )


def _sizes(db: sqlite3.Connection, rollout_id: str) -> tuple[int, int, int]:
    """Return (calls, prompt tokens, sampled tokens) of a rollout."""
    # A prompt is its parent's prompt and reply, followed by the new tokens.
    ends: dict[int, int] = {-1: 0}
    calls = prompts = sampled = 0
    for row in db.execute(_CALLS, (rollout_id,)):
        prompt = ends.get(row["parent"], 0) + row["new"]
        ends[row["turn"]] = prompt + row["sampled"]
        calls, prompts, sampled = calls + 1, prompts + prompt, sampled + row["sampled"]
    return calls, prompts, sampled
