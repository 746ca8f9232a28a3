"""Durable state machine of rollouts: no graded rollout is lost, none is trained twice.

    planned -> running -> graded -> scored -> assigned -> trained
       |          |          |         |          |
       +----------+----------+---------+----------+------> discarded(reason)

`scored`: the group is closed, so its baseline is known. `assigned`: taken by an uncommitted optimizer step.
On resume, `recover` moves running rollouts back to planned (same id, next attempt) and assigned ones back to
scored. Only `Store.commit_step` sets `trained`, in the transaction that commits the step. A step's `account`
is the set of rollouts whose tokens its ledger counts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

from insitu.errors import RecordError
from insitu.storage.attempts import interrupt_running
from insitu.storage.columns import Row
from insitu.storage.database import Database
from insitu.storage.rollout_rows import insert, read_ledger
from insitu.types import Ledger, Rollout, Status

State = Literal["planned", "running", "graded", "scored", "assigned", "trained", "discarded"]
STATES: tuple[State, ...] = get_args(State)
Reason = Literal[
    "evaluation",
    "infra",
    "ungraded",
    "degenerate",
    "zero_advantage",
    "truncated",
    "stale",
    "deadline",
    "overlong",
    "unused",
    "few_groups",
    "bad_step",
    "no_tokens",
]
"""Why a rollout is not trained; its tokens are excluded under this key. `stale`: over the staleness bound;
`ungraded`: the reward function returned None;
`deadline`: its group exceeded its deadline; `unused`: the run ended first, or only served; `few_groups`: its
step had fewer groups with a gradient than `train.min_groups`; `bad_step`: the step was refused and
`train.on_bad_step` is skip; `overlong`: every row exceeds
`train.max_row_tokens`; `no_tokens`: no token was sampled, or all are excluded for other reasons."""
SERVE = "serve"
"""Phase of the sessions of `insitu serve`."""
REASONS: frozenset[str] = frozenset(get_args(Reason))
OPEN: tuple[State, ...] = ("planned", "running")
TAKEN: tuple[State, ...] = ("assigned",)
UNUSED: tuple[State, ...] = ("graded", "scored", "assigned")


class _RolloutPlace(Protocol):
    """Identity of a rollout: its phase, step, group and slot."""

    @property
    def rollout_id(self) -> str: ...

    @property
    def phase(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def slot(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """Stored state of one rollout."""

    rollout_id: str
    phase: str
    step: int
    """Step it was planned for; the optimizer step that trains it may differ, see `account`."""
    group: int
    slot: int
    task_id: str
    state: State
    reason: str
    """Why it was discarded, else empty."""
    attempt: int
    """Number of its last attempt; 0 before the first."""
    version: int
    """Policy version when its last attempt started; before the first, when it was planned."""
    oldest: int | None
    """Oldest policy version among its trainable tokens; None before grading or without such tokens."""
    account: int | None
    """Optimizer step whose ledger counts its tokens; None = none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Verified totals of a run's rollouts and tokens."""

    states: Mapping[str, int]
    """Rollouts by state."""
    discarded: Mapping[str, int]
    """Discarded rollouts by reason."""
    tokens: Ledger
    """Tokens of everything stored except `pending`."""
    pending: int
    """Sampled tokens of graded rollouts that are neither trained nor discarded yet."""
    attempts: Mapping[str, int]
    """Attempts by end, see `storage.attempts`."""


class Lifecycle(Database):
    """State transitions and queries of rollouts; base class of Store."""

    # ------------------------------------------------------------------ transitions

    def plan(self, places: Sequence[_RolloutPlace], task_id: str, version: int) -> None:
        """Record rollouts of one task as planned; rollouts that are already stored are unchanged."""
        with self._writing("plan", synced=False) as db:
            for place in places:
                at = {"phase": place.phase, "step": place.step, "group_no": place.group, "slot": place.slot}
                if _state(db, place.rollout_id) is None:
                    _insert(db, place.rollout_id, at, task_id, version)

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """Record the start of an attempt.

        Raises RecordError when the rollout was not planned or is already decided.
        """
        with self._writing("start", synced=False) as db:
            done = db.execute(
                "UPDATE states SET state = 'running', reason = '', attempt = ?, version = ?"
                f" WHERE rollout_id = ? AND (state IN ('planned', 'running') OR {_REPLACEABLE})",
                (attempt, version, rollout_id),
            )
            if done.rowcount != 1:
                raise RecordError(f"rollout {rollout_id} cannot be started: {_describe(db, rollout_id)}")

    def score(self, rollout_ids: Collection[str]) -> None:
        """Mark graded rollouts of a closed group as scored."""
        self._move("score", rollout_ids, ("graded", "scored"), "state = 'scored'")

    def close_group(self, phase: str, step: int, group: int) -> None:
        """Score the graded rollouts of a group; no-op while any of it is planned or running."""
        of_group = "phase = :phase AND step = :step AND group_no = :group"
        place = {"phase": phase, "step": step, "group": group}
        with self._reading() as db:
            if db.execute(f"SELECT 1 FROM states WHERE {of_group} AND state IN {OPEN}", place).fetchone():
                return
        with self._writing("score", synced=False) as db:
            db.execute(f"UPDATE states SET state = 'scored' WHERE {of_group} AND state = 'graded'", place)

    def assign(self, step: int, rollout_ids: Collection[str]) -> None:
        """Assign graded rollouts to the current optimizer step."""
        self._move("assign", rollout_ids, ("graded", "scored"), f"state = 'assigned', account = {int(step)}")

    def discard(self, rollout_ids: Collection[str], reason: Reason) -> None:
        """Mark rollouts as discarded; those already discarded keep their first reason.

        Raises RecordError when one of them is trained or unknown.
        """
        if reason not in REASONS:
            raise RecordError(f"no such reason to discard a rollout: {reason!r}")

        change = (
            f"reason = CASE state WHEN 'discarded' THEN reason ELSE '{reason}' END,"
            " account = CASE state WHEN 'discarded' THEN account END, state = 'discarded'"
        )
        self._move("discard", rollout_ids, (*OPEN, *UNUSED, "discarded"), change)

    def recover(self) -> Mapping[str, int]:
        """Reset rollouts that a crash left running or assigned; return how many of each.

        Running rollouts become planned and their attempt interrupted; rollouts assigned to an uncommitted
        step become scored. Call it once, before a resumed run starts anything.
        """
        with self._writing("recover") as db:
            interrupt_running(db)
            running = db.execute("UPDATE states SET state = 'planned' WHERE state = 'running'").rowcount
            assigned = db.execute(
                "UPDATE states SET state = 'scored', account = NULL WHERE state = 'assigned'"
            ).rowcount
        return {"running": running, "assigned": assigned}

    def _move(self, what: str, ids: Collection[str], sources: Collection[State], change: str) -> None:
        with self._writing(what) as db:
            move(db, ids, sources, change)

    # ------------------------------------------------------------------ queries

    def state(self, rollout_id: str) -> RolloutState | None:
        """Return the state of one rollout; None when it is unknown."""
        return next(iter(self._states("rollout_id = ?", rollout_id)), None)

    def open_rollouts(self) -> list[RolloutState]:
        """Return planned and running rollouts, in order of (phase, step, group, slot)."""
        return self._states(f"state IN {OPEN}")

    def unused_graded(self) -> list[RolloutState]:
        """Return graded rollouts that may still be trained, in order of (phase, step, group, slot)."""
        return self._states(f"state IN {UNUSED}")

    def group_states(self, phase: str, step: int, group: int) -> list[RolloutState]:
        """Return the rollouts of one group, ordered by slot."""
        return self._states("phase = ? AND step = ? AND group_no = ?", phase, step, group)

    def last_place(self, phase: str) -> tuple[int, int] | None:
        """Return (step, group) of the last planned group; None before the first."""
        with self._reading() as db:
            row = db.execute(
                "SELECT step, group_no FROM states WHERE phase = ? ORDER BY step DESC, group_no DESC LIMIT 1",
                (phase,),
            ).fetchone()
        return None if row is None else (row["step"], row["group_no"])

    def open_counts(self) -> dict[str, int]:
        """Count planned and running rollouts."""
        rows = self._all(f"SELECT state, COUNT(*) AS n FROM states WHERE state IN {OPEN} GROUP BY state")
        return dict.fromkeys(OPEN, 0) | {row["state"]: row["n"] for row in rows}

    def states(self) -> dict[str, int]:
        """Count rollouts by state, zeros included."""
        with self._reading() as db:
            rows = db.execute("SELECT state, COUNT(*) AS n FROM states GROUP BY state").fetchall()
        return dict.fromkeys(STATES, 0) | {row["state"]: row["n"] for row in rows}

    def discards(self) -> dict[str, int]:
        """Count discarded rollouts by reason."""
        counts: dict[str, int] = {}
        for rollout in self._states("state = 'discarded'"):
            counts[rollout.reason] = counts.get(rollout.reason, 0) + 1
        return dict(sorted(counts.items()))

    def _states(self, where: str, *values: object) -> list[RolloutState]:
        query = f"SELECT * FROM states WHERE {where} ORDER BY phase, step, group_no, slot"
        with self._reading() as db:
            return [_read(row) for row in db.execute(query, values)]


_REPLACEABLE = "(state = 'discarded' AND reason = 'infra' AND account IS NULL)"
"""Infrastructure failures that no committed step has counted; these may be stored again."""


def decide(db: sqlite3.Connection, at: Mapping[str, object], rollout: Rollout) -> None:
    """Set a rollout to graded, or to discarded when it can never be trained.

    Runs in the transaction that stores the rollout. `at`: phase, step, group_no, slot. Raises RecordError
    when it was decided before.
    """
    reason = "infra" if rollout.status is Status.INFRA_FAILED else ""
    if not reason and at["phase"] != "train":
        reason = "unused" if at["phase"] == SERVE else "evaluation"
    state: State = "discarded" if reason else "graded"
    sampled = [
        s.versions[s.mask] for s in rollout.trajectory.segments if s.kind == "sampled" and s.mask.any()
    ]
    oldest = min((int(versions.min()) for versions in sampled), default=None)
    if _state(db, rollout.id) is None:
        _insert(db, rollout.id, at, rollout.task_id, oldest or 0)
    done = db.execute(
        "UPDATE states SET state = ?, reason = ?, attempt = ?, oldest = ? WHERE rollout_id = ?"
        f" AND (state IN ('planned', 'running') OR {_REPLACEABLE})",
        (state, reason, rollout.attempt, oldest, rollout.id),
    )
    if done.rowcount != 1:
        raise RecordError(f"rollout {rollout.id} cannot be stored: {_describe(db, rollout.id)}")


def settle(
    db: sqlite3.Connection,
    step: int,
    ledger: Ledger,
    trained: Collection[str],
    discarded: Mapping[str, str],
) -> None:
    """Set the rollouts of a step to trained or discarded, in the transaction that commits the step.

    Raises RecordError when a rollout was not assigned to the step, an assigned one is neither trained nor
    discarded, a reason is unknown, or the tokens of the rollouts differ from the step's ledger.
    """
    unknown = sorted(set(discarded.values()) - REASONS)
    if unknown:
        raise RecordError(f"step {step}: no such reason to discard a rollout: {unknown[0]!r}")
    of_step = f"account = {int(step)}"
    move(db, trained, TAKEN, "state = 'trained'", f"AND {of_step}")
    for reason in sorted(set(discarded.values())):
        ids = [rollout_id for rollout_id, why in discarded.items() if why == reason]
        change = f"state = 'discarded', reason = '{reason}', {of_step}"
        move(db, ids, ("assigned", "discarded"), change, f"AND ({of_step} OR account IS NULL)")
    unsettled = db.execute(f"SELECT rollout_id FROM states WHERE state = 'assigned' AND {of_step}").fetchone()
    if unsettled is not None:
        raise RecordError(f"step {step}: rollout {unsettled['rollout_id']} is neither trained nor discarded")
    ledgers = step_ledgers(db, step)
    captured, trainable = sum(x.captured for x in ledgers), sum(x.trained for x in ledgers)
    if captured != ledger.captured or ledger.trained > trainable:
        raise RecordError(
            f"step {step}: its ledger counts {ledger.captured} captured and {ledger.trained} trained tokens,"
            f" its rollouts hold {captured} and at most {trainable}"
        )


def step_ledgers(db: sqlite3.Connection, step: int) -> list[Ledger]:
    """Return the ledgers of the rollouts in a step's account, as they were sealed."""
    rows = db.execute(
        "SELECT r.ledger FROM states s JOIN rollouts r USING (rollout_id) WHERE s.account = ?", (step,)
    ).fetchall()
    return [read_ledger(row["ledger"]) for row in rows]


def move(
    db: sqlite3.Connection, ids: Collection[str], sources: Collection[State], change: str, condition: str = ""
) -> None:
    """Apply `change` to rollouts that are in one of the states `sources`.

    Raises RecordError for a rollout in any other state.
    """
    allowed = ", ".join(f"'{state}'" for state in sources)
    for rollout_id in ids:
        done = db.execute(
            f"UPDATE states SET {change} WHERE rollout_id = ? AND state IN ({allowed}) {condition}",
            (rollout_id,),
        )
        if done.rowcount != 1:
            expected = " or ".join(sources)
            raise RecordError(f"rollout {rollout_id} is not {expected}: {_describe(db, rollout_id)}")


def _insert(
    db: sqlite3.Connection, rollout_id: str, at: Mapping[str, object], task_id: str, version: int
) -> None:
    values = {name: at[name] for name in ("phase", "step", "group_no", "slot")}
    values |= {"rollout_id": rollout_id, "task_id": task_id, "state": "planned", "reason": ""}
    insert(db, "states", values | {"attempt": 0, "version": version, "oldest": None, "account": None})


def _state(db: sqlite3.Connection, rollout_id: str) -> Row | None:
    row: Row | None = db.execute("SELECT * FROM states WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return row


def _describe(db: sqlite3.Connection, rollout_id: str) -> str:
    """Describe a rollout's state for an error message."""
    row = _state(db, rollout_id)
    if row is None:
        return "it is not in this run"
    text = f"it is {row['state']}"
    if row["reason"]:
        text += f" ({row['reason']})"
    return text if row["account"] is None else f"{text} by step {row['account']}"


def _read(row: Row) -> RolloutState:
    return RolloutState(
        rollout_id=row["rollout_id"],
        phase=row["phase"],
        step=row["step"],
        group=row["group_no"],
        slot=row["slot"],
        task_id=row["task_id"],
        state=cast(State, row["state"]),
        reason=row["reason"],
        attempt=row["attempt"],
        version=row["version"],
        oldest=row["oldest"],
        account=row["account"],
    )
