"""Store of a run: rollouts, verdicts and steps in SQLite (WAL mode, one writer).

Invariants: `put_rollout` returns after the rollout is on disk (synchronous=FULL); `commit_step` is one
transaction. After kill -9 at any moment, a new Store contains every rollout and step whose call had returned.

Calls block for a few milliseconds and are thread-safe. The lock of `RunDir` ensures a single writing process.
Errors are `RecordError` with a one-line message.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from insitu.capture.ledger import reassign
from insitu.errors import RecordError
from insitu.storage.attempts import count_attempts
from insitu.storage.columns import Row
from insitu.storage.database import EmptyStore
from insitu.storage.lifecycle import UNUSED, Balance, Lifecycle, decide, settle, step_ledgers
from insitu.storage.metrics import Metrics
from insitu.storage.pass_at_k import TaskCounts
from insitu.storage.rollout_rows import (
    dumps,
    erase_rollout,
    insert,
    read_drifts,
    read_ledger,
    read_rollout,
    rewrite_reward,
    write_attempt,
    write_rollout,
)
from insitu.storage.schema import TASK_SET
from insitu.storage.score import Score
from insitu.storage.summaries import RolloutSummary, read_summaries
from insitu.storage.ulid import new_ulid
from insitu.types import DriftNote, Ledger, Rollout, Status, arm_of
from insitu.types.values import Value

__all__ = ["EmptyStore", "Score", "ScoresBy", "StepRecord", "Store", "add_ledgers"]

ScoresBy = Literal["category", "task_set", "part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Value):
    """One committed optimizer step."""

    step: int
    checkpoint: str
    """Path of the weights after this step, relative to the run directory."""
    plan_hash: str
    """Hex digest of the trained plan; a bit-identical resume reproduces it."""
    metrics: Mapping[str, Any] = field(repr=False)
    ledger: Ledger
    committed_s: float
    """Seconds since the epoch."""


class Store(Lifecycle):
    """Database of one run; a context manager, opened for writing unless `readonly=True`."""

    # ------------------------------------------------------------------ rollouts

    def put_rollout(self, phase: str, step: int, group: int, slot: int, rollout: Rollout) -> None:
        """Store a decided rollout durably.

        Raises RecordError when it is stored already. An infrastructure failure may be replaced while no step
        has counted it and, outside training, while the phase is still open.
        """
        place = {"ulid": new_ulid(), "phase": phase, "step": step, "group_no": group, "slot": slot}
        with self._writing("graded") as db:
            stored = db.execute("SELECT status FROM rollouts WHERE rollout_id = ?", (rollout.id,)).fetchone()
            if stored is not None:
                # In training the accounting step may differ from `step`, so `decide` checks it.
                late = phase != "train" and not _open(db, phase, step)
                if stored["status"] != Status.INFRA_FAILED.value or late:
                    raise RecordError(f"rollout {rollout.id} is stored already")
                erase_rollout(db, rollout.id)
            write_rollout(db, place, rollout)
            decide(db, place, rollout)

    def put_reward(self, rollout: Rollout) -> None:
        """Replace verdict, reward and components of a stored rollout by those of `rollout`."""
        with self._writing("verdict") as db:
            rewrite_reward(db, rollout)

    def still_open(self, phase: str, step: int) -> bool:
        """Return whether the current weights are still those of this phase and step."""
        with self._reading() as db:
            return _open(db, phase, step)

    def put_attempt(self, rollout: Rollout) -> None:
        """Store a failed attempt with its ledger; the last attempt is stored by `put_rollout`."""
        with self._writing("attempt") as db:
            write_attempt(db, rollout)

    def tried(self, prefix: str) -> dict[str, int]:
        """Map rollout ids that begin with `prefix` to the number of their last attempt, finished or not."""
        among = "WHERE rollout_id >= :first AND rollout_id < :after"
        query = (
            f"SELECT rollout_id, attempt AS n FROM attempts {among}"
            f" UNION ALL SELECT rollout_id, attempt FROM states {among}"
        )
        bounds = {"first": prefix, "after": prefix + "\U0010ffff"}
        with self._reading() as db:
            grouped = f"SELECT rollout_id, MAX(n) AS n FROM ({query}) GROUP BY rollout_id HAVING MAX(n) > 0"
            return {row["rollout_id"]: row["n"] for row in db.execute(grouped, bounds)}

    def attempts_by_end(self) -> dict[str, int]:
        """Count attempts by end, see `storage.attempts`."""
        with self._reading() as db:
            return count_attempts(db)

    def attempts(self, rollout_id: str) -> list[tuple[int, Status, str]]:
        """Return (attempt, status, error) of every stored attempt, in order."""
        rows = self._all("SELECT * FROM attempts WHERE rollout_id = ? ORDER BY attempt", (rollout_id,))
        return [(row["attempt"], Status(row["status"]), row["error"]) for row in rows]

    def rollouts(self, phase: str, step: int) -> list[Rollout]:
        """Return the rollouts of one phase and step by (group, slot), with read-only arrays."""
        query = "SELECT * FROM rollouts WHERE phase = ? AND step = ? ORDER BY group_no, slot"
        with self._reading() as db:
            return [read_rollout(db, row) for row in db.execute(query, (phase, step)).fetchall()]

    def step_rollouts(self, step: int) -> list[Rollout]:
        """Return every rollout in a committed step's account, trained or not.

        Ordered by (step, group, slot): the input of the step's plan.
        """
        account = "SELECT r.* FROM rollouts r JOIN states s USING (rollout_id) WHERE s.account = ?"
        with self._reading() as db:
            rows = db.execute(f"{account} ORDER BY r.step, r.group_no, r.slot", (step,)).fetchall()
            return [read_rollout(db, row) for row in rows]

    def step_score(self, step: int) -> Score:
        """Return the score of the rollouts in a committed step's account."""
        account = "JOIN states s USING (rollout_id) WHERE s.account = ?"
        with self._reading() as db:
            rewards = f"SELECT r.reward FROM rollouts r {account} AND r.reward IS NOT NULL"
            return Score.of([row["reward"] for row in db.execute(rewards, (step,))])

    def rollout(self, rollout_id: str) -> Rollout:
        """Return one rollout by its id.

        Raises RecordError when there is none.
        """
        with self._reading() as db:
            row = db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
            if row is None:
                raise RecordError(f"{self._path} holds no rollout {rollout_id}")
            return read_rollout(db, row)

    def outcomes(self, phase: str, step: int) -> list[RolloutSummary]:
        """Return summaries of the rollouts of one phase and step, ordered by (group, slot)."""
        with self._reading() as db:
            return read_summaries(db, phase, step)

    def drifts(self) -> list[DriftNote]:
        """Return the prompt drifts of all stored rollouts."""
        with self._reading() as db:
            return read_drifts(db)

    def places(self, phase: str, step: int) -> dict[tuple[int, int], str]:
        """Map (group, slot) of stored rollouts to their ids."""
        query = "SELECT group_no, slot, rollout_id FROM rollouts WHERE phase = ? AND step = ?"
        rows = self._all(query, (phase, step))
        return {(row["group_no"], row["slot"]): row["rollout_id"] for row in rows}

    def phases(self) -> dict[tuple[str, int], int]:
        """Map (phase, step) to the number of stored rollouts, in order of their first rollout."""
        query = "SELECT phase, step, COUNT(*) AS n FROM rollouts GROUP BY phase, step ORDER BY MIN(ulid)"
        return {(row["phase"], row["step"]): row["n"] for row in self._all(query)}

    def group_outcomes(self) -> list[sqlite3.Row]:
        """Return task set, task, graded and truncated rollouts and sums of rewards of training's groups."""
        return self._all(
            f"SELECT {TASK_SET} AS task_set, r.task_id, COUNT(*) AS graded, SUM(r.reward) AS reward_sum,"
            " SUM(r.reward * r.reward) AS square_sum, SUM(r.status = 'truncated') AS truncated"
            " FROM rollouts r JOIN states s USING (rollout_id)"
            " WHERE r.phase = 'train' AND r.reward IS NOT NULL AND s.state IN ('trained', 'discarded')"
            " GROUP BY r.step, r.group_no ORDER BY r.step, r.group_no"
        )

    def scores(self, phase: str, step: int | None, by: ScoresBy = "category") -> dict[str, Score]:
        """Map task categories, task sets or labels of parts to the scores of one phase and step; "" = total.

        step: None = of all steps. Scores are means over tasks, of training over rollouts.
        """
        query = (
            f"SELECT category, reward, part, {TASK_SET} AS task_set, task_id FROM rollouts"
            " WHERE phase = :phase AND step = COALESCE(:step, step) AND reward IS NOT NULL"
            f" ORDER BY {by}, group_no, slot"
        )
        found: dict[str, list[sqlite3.Row]] = {}
        for row in self._all(query, {"phase": phase, "step": step}):
            found.setdefault(arm_of(row[by] or "").label if by == "part" else row[by], []).append(row)
        every = [row for rows in found.values() for row in rows]
        return {
            name: _score(rows, phase)
            for name, rows in ({"": every} | {name: rows for name, rows in found.items() if name}).items()
        }

    def ledger(self) -> Ledger:
        """Return the ledger of everything stored: steps, evaluations, discards and failed attempts.

        Raises RecordError when it does not balance or tokens are pending.
        """
        balance = self.check_balance()
        if balance.pending:
            raise RecordError(
                f"the ledger of the run does not balance: the fate of {balance.pending} stored tokens is open"
            )
        return balance.tokens

    def check_balance(self) -> Balance:
        """Return the verified totals of rollouts and tokens at any moment of a run.

        Raises RecordError that names the first inconsistent rollout, step or sum.
        """
        steps = self.steps()
        with self._reading() as db:
            return _balance(db, steps)

    # ------------------------------------------------------------------ steps

    def commit_step(
        self,
        step: int,
        metrics: Metrics,
        checkpoint: str,
        plan_hash: str,
        ledger: Ledger,
        *,
        trained: Collection[str] = (),
        discarded: Mapping[str, str] | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> None:
        """Commit one optimizer step in one transaction; its checkpoint must be on disk.

        `trained` and `discarded` (rollout id -> reason) must cover all rollouts assigned to the step and may
        include infrastructure failures. `meta` facts are stored with it. Raises RecordError when the ledger
        does not balance or `step` does not follow the last committed step.
        """
        if not ledger.balanced:
            raise RecordError(f"step {step}: the ledger does not balance: {ledger}")
        with self._writing("step") as db:
            last = db.execute("SELECT MAX(step) AS step FROM steps").fetchone()["step"]
            if last is not None and step <= last:
                raise RecordError(f"step {step} cannot follow step {last}: it would be trained twice")
            settle(db, step, ledger, trained, discarded or {})
            values: dict[str, object] = {"step": step, "committed_s": time.time(), "checkpoint": checkpoint}
            insert(db, "steps", values | {"plan_hash": plan_hash, "metrics": dumps(dict(metrics))})
            entries = {"captured": ledger.captured, "trained": ledger.trained, **ledger.excluded}
            for entry, tokens in entries.items():
                insert(db, "ledger", {"step": step, "entry": entry, "tokens": tokens})
            for fact in (meta or {}).items():
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", fact)

    def steps(self) -> list[StepRecord]:
        """Return every committed step in order."""
        with self._reading() as db:
            rows = db.execute("SELECT * FROM steps ORDER BY step").fetchall()
            return [_step(db, row) for row in rows]

    def last_step(self) -> StepRecord | None:
        """Return the newest committed step; None before the first."""
        with self._reading() as db:
            row = db.execute("SELECT * FROM steps ORDER BY step DESC LIMIT 1").fetchone()
            return None if row is None else _step(db, row)


def add_ledgers(ledgers: Sequence[Ledger]) -> Ledger:
    """Return the sum of ledgers."""
    excluded: dict[str, int] = {}
    for ledger in ledgers:
        for reason, tokens in ledger.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + tokens
    return Ledger(
        captured=sum(x.captured for x in ledgers),
        trained=sum(x.trained for x in ledgers),
        excluded=dict(sorted(excluded.items())),
    )


def _open(db: sqlite3.Connection, phase: str, step: int) -> bool:
    """See `Store.still_open`; training: until a committed step has counted one of these rollouts."""
    if phase != "train":
        last: int = db.execute("SELECT COALESCE(MAX(step), 0) AS step FROM steps").fetchone()["step"]
        return step >= last
    counted = (
        "SELECT 1 FROM states s JOIN steps c ON c.step = s.account"
        " WHERE s.phase = 'train' AND s.step = ? LIMIT 1"
    )
    return db.execute(counted, (step,)).fetchone() is None


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


def _balance(db: sqlite3.Connection, steps: Sequence[StepRecord]) -> Balance:
    """See `Store.check_balance`."""
    failed = (
        "SELECT a.ledger FROM attempts a LEFT JOIN rollouts r USING (rollout_id, attempt)"
        " WHERE r.rollout_id IS NULL"
    )
    ended = [read_ledger(row["ledger"]) for row in db.execute(failed)]
    stored = sum(ledger.captured for ledger in ended)
    states: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    pending = 0
    _check_rows(db)
    _check_steps(db, steps)
    query = "SELECT s.*, r.ledger FROM states s LEFT JOIN rollouts r USING (rollout_id)"
    for row in db.execute(query):
        states[row["state"]] += 1
        if row["state"] == "discarded":
            reasons[row["reason"]] += 1
        if row["ledger"] is None:
            continue
        ledger = read_ledger(row["ledger"])
        stored += ledger.captured
        if row["state"] in UNUSED:
            pending += ledger.captured
        elif row["account"] is None:
            # Without a reason: an infrastructure failure that is being retried.
            ended.append(reassign(ledger, row["reason"] or "infra"))
    total = add_ledgers([*(step.ledger for step in steps), *ended])
    if not total.balanced or total.captured + pending != stored:
        raise RecordError(
            f"the ledger of the run does not balance: {total}, {pending} tokens pending, {stored} are stored"
        )
    return Balance(
        states=dict(states),
        discarded=dict(sorted(reasons.items())),
        tokens=total,
        pending=pending,
        attempts=count_attempts(db),
    )


def _score(rows: Sequence[sqlite3.Row], phase: str) -> Score:
    """Return the score of graded rollouts; the same task of two sets counts as two."""
    if phase == "train":
        return Score.of([row["reward"] for row in rows])
    rewards: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        rewards.setdefault((row["task_set"], row["task_id"]), []).append(row["reward"])
    return Score.of_tasks([TaskCounts.of(own) for own in rewards.values()])


def _check_rows(db: sqlite3.Connection) -> None:
    """Check that every stored rollout has a matching state and every decided one is stored."""
    queries = {
        "is stored without a matching state": "SELECT r.rollout_id FROM rollouts r"
        " LEFT JOIN states s USING (rollout_id)"
        " WHERE s.state IS NULL OR s.state IN ('planned', 'running') AND r.status != 'infra_failed'",
        "is graded but not stored": "SELECT s.rollout_id FROM states s"
        " LEFT JOIN rollouts r USING (rollout_id)"
        " WHERE r.rollout_id IS NULL AND s.state IN ('graded', 'scored', 'assigned', 'trained')",
        "is trained but not by a committed step": "SELECT s.rollout_id FROM states s LEFT JOIN steps c"
        " ON c.step = s.account WHERE c.step IS NULL AND s.state = 'trained'",
        "is assigned to a step that is already committed": "SELECT s.rollout_id FROM states s JOIN steps c"
        " ON c.step = s.account WHERE s.state = 'assigned'",
    }
    for error, query in queries.items():
        row = db.execute(f"{query} LIMIT 1").fetchone()
        if row is not None:
            raise RecordError(f"the ledger of the run does not balance: rollout {row['rollout_id']} {error}")


def _check_steps(db: sqlite3.Connection, steps: Sequence[StepRecord]) -> None:
    """Check that the ledger of every committed step equals the tokens of its rollouts."""
    for step in steps:
        captured = sum(ledger.captured for ledger in step_ledgers(db, step.step))
        if captured != step.ledger.captured:
            raise RecordError(
                f"the ledger of the run does not balance: step {step.step} counts {step.ledger.captured}"
                f" tokens, its rollouts hold {captured}"
            )
