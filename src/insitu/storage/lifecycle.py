"""The life of every rollout, durable: nothing graded is lost, nothing is trained twice.

    planned -> running -> graded -> scored -> assigned -> trained
       |          |          |         |          |
       +----------+----------+---------+----------+------> discarded(reason)

`scored`: its group is closed, so its baseline is known. `assigned`: taken by an optimizer step that is not
committed yet. A resumed run calls `recover`: what ran is planned again under the same id, with the next
number of try; what was assigned is scored again. Only `Store.commit_step` makes `trained`, in the transaction
that commits the step. A step's `account` is the set of rollouts whose tokens its ledger counts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

from insitu.errors import RecordError
from insitu.storage.attempts import interrupt_running
from insitu.storage.database import Database
from insitu.storage.rollout_rows import Row, has_table, insert, read_ledger
from insitu.types import Ledger, Rollout, Status

State = Literal["planned", "running", "graded", "scored", "assigned", "trained", "discarded"]
STATES: tuple[State, ...] = get_args(State)
Reason = Literal[
    "evaluation",
    "infra",
    "degenerate",
    "zero_advantage",
    "truncated",
    "stale",
    "deadline",
    "overlong",
    "unused",
    "few_groups",
    "no_tokens",
]
"""Why a rollout is not trained: the word under which its tokens are excluded. `stale`: it could not meet the
bound any more; `deadline`: its group had waited long enough; `unused`: the run ended first; `few_groups`: its
step had fewer groups with a gradient than `train.min_groups` asks for; `overlong`: no row of it is within
`train.max_row_tokens`; `no_tokens`: none was sampled, or each is excluded for a reason of its own."""
REASONS: frozenset[str] = frozenset(get_args(Reason))
OPEN: tuple[State, ...] = ("planned", "running")
TAKEN: tuple[State, ...] = ("assigned",)
UNUSED: tuple[State, ...] = ("graded", "scored", "assigned")


class RolloutPlace(Protocol):
    """Where a rollout belongs; the collector's Slot is one."""

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
    """Where one rollout stands."""

    rollout_id: str
    phase: str
    step: int
    """Of its place; the optimizer step that trains it may be another, see `account`."""
    group: int
    slot: int
    task_id: str
    state: State
    reason: str
    """Why it was discarded, else empty."""
    attempt: int
    """Number of its last try; 0 before the first."""
    version: int
    """Policy version when it was planned, then when its last try started."""
    oldest: int | None
    """Oldest policy version among its trainable tokens; None before it is graded, or when it has none."""
    account: int | None
    """Optimizer step that has taken it, whose ledger counts its tokens; None = no step has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A run's account, found in order."""

    states: Mapping[str, int]
    """Rollouts by state."""
    discarded: Mapping[str, int]
    """Rollouts by the reason for which they were discarded."""
    tokens: Ledger
    """Of everything stored but `pending`."""
    pending: int
    """Sampled tokens of graded rollouts whose fate is still open."""
    tries: Mapping[str, int]
    """Tries by their end, see tries.py."""


class Lifecycle(Database):
    """The part of the store that knows where each rollout stands."""

    # ------------------------------------------------------------------ moves

    def plan(self, places: Sequence[RolloutPlace], task_id: str, version: int) -> None:
        """These rollouts of one task are to be made. What is known already stays as it is."""
        with self._writing("plan") as db:
            for place in places:
                at = {"phase": place.phase, "step": place.step, "group_no": place.group, "slot": place.slot}
                if _state(db, place.rollout_id) is None:
                    _insert(db, place.rollout_id, at, task_id, version)

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """A try begins. Raises RecordError when it was not planned or is decided already."""
        with self._writing("start") as db:
            done = db.execute(
                "UPDATE states SET state = 'running', reason = '', attempt = ?, version = ?"
                f" WHERE rollout_id = ? AND (state IN ('planned', 'running') OR {_REPLACEABLE})",
                (attempt, version, rollout_id),
            )
            if done.rowcount != 1:
                raise RecordError(f"rollout {rollout_id} cannot be started: {_said(db, rollout_id)}")

    def score(self, rollout_ids: Collection[str]) -> None:
        """The group of these graded rollouts is closed: its baseline is known."""
        self._move("score", rollout_ids, ("graded", "scored"), "state = 'scored'")

    def close_group(self, phase: str, step: int, group: int) -> None:
        """Score what is graded of a group of which nothing is planned or running any more; else do
        nothing."""
        members = self.group_states(phase, step, group)
        graded = [m.rollout_id for m in members if m.state == "graded"]
        if graded and not any(m.state in OPEN for m in members):
            self.score(graded)

    def assign(self, step: int, rollout_ids: Collection[str]) -> None:
        """The optimizer step that is under way takes these graded rollouts."""
        self._move("assign", rollout_ids, ("graded", "scored"), f"state = 'assigned', account = {int(step)}")

    def discard(self, rollout_ids: Collection[str], reason: Reason) -> None:
        """These rollouts will not be trained. What is discarded already keeps its reason.
        Raises RecordError when one of them is trained, or is no rollout of this run."""
        if reason not in REASONS:
            raise RecordError(f"no such reason to discard a rollout: {reason!r}")
        # an earlier reason stands; only the first one is told
        change = (
            f"reason = CASE state WHEN 'discarded' THEN reason ELSE '{reason}' END,"
            " account = CASE state WHEN 'discarded' THEN account END, state = 'discarded'"
        )
        self._move("discard", rollout_ids, (*OPEN, *UNUSED, "discarded"), change)

    def recover(self) -> Mapping[str, int]:
        """Begin again after a crash: what ran is planned, and its try is interrupted; what was assigned to a
        step that was not committed is scored. Returns how many of each. Call it once, before a resumed run
        starts anything."""
        with self._writing("recover") as db:
            interrupt_running(db)
            ran = db.execute("UPDATE states SET state = 'planned' WHERE state = 'running'").rowcount
            taken = db.execute(
                "UPDATE states SET state = 'scored', account = NULL WHERE state = 'assigned'"
            ).rowcount
        return {"running": ran, "assigned": taken}

    def _move(self, what: str, ids: Collection[str], of: Collection[State], change: str) -> None:
        with self._writing(what) as db:
            move(db, ids, of, change)

    # ------------------------------------------------------------------ questions

    def state(self, rollout_id: str) -> RolloutState | None:
        """Where one rollout stands; None when the run knows nothing of it."""
        return next(iter(self._states("rollout_id = ?", rollout_id)), None)

    def open_rollouts(self) -> list[RolloutState]:
        """Planned and running ones, in the order of their places: what a resumed run makes again."""
        return self._states(f"state IN {OPEN}")

    def unused_graded(self) -> list[RolloutState]:
        """Graded, not trained and not discarded, in the order of their places: what may still be trained."""
        return self._states(f"state IN {UNUSED}")

    def group_states(self, phase: str, step: int, group: int) -> list[RolloutState]:
        """Every rollout of one group, by slot."""
        return self._states("phase = ? AND step = ? AND group_no = ?", phase, step, group)

    def last_place(self, phase: str) -> tuple[int, int] | None:
        """(step, group) of the last group that was ever planned; None before the first."""
        with self._reading() as db:
            row = db.execute(
                "SELECT step, group_no FROM states WHERE phase = ? ORDER BY step DESC, group_no DESC LIMIT 1",
                (phase,),
            ).fetchone()
        return None if row is None else (row["step"], row["group_no"])

    def states(self) -> dict[str, int]:
        """Rollouts by state; every state is there. Empty for a directory of an older insitu."""
        with self._reading() as db:
            if not has_table(db, "states"):
                return {}
            rows = db.execute("SELECT state, COUNT(*) AS n FROM states GROUP BY state").fetchall()
        return dict.fromkeys(STATES, 0) | {row["state"]: row["n"] for row in rows}

    def discards(self) -> dict[str, int]:
        """Discarded rollouts by reason."""
        found: dict[str, int] = {}
        for held in self._states("state = 'discarded'"):
            found[held.reason] = found.get(held.reason, 0) + 1
        return dict(sorted(found.items()))

    def _states(self, where: str, *values: object) -> list[RolloutState]:
        query = f"SELECT * FROM states WHERE {where} ORDER BY phase, step, group_no, slot"
        with self._reading() as db:
            return [_read(row) for row in db.execute(query, values)] if has_table(db, "states") else []


_REPLACEABLE = "(state = 'discarded' AND reason = 'infra' AND account IS NULL)"
"""Failed of the infrastructure, and no step has counted on that yet."""


def decide(db: sqlite3.Connection, at: Mapping[str, object], rollout: Rollout) -> None:
    """A rollout is decided, in the transaction that stores it: graded, or discarded where it can never be
    trained. `at`: phase, step, group_no, slot. Raises RecordError when it was decided before."""
    reason = "infra" if rollout.status is Status.INFRA_FAILED else ""
    if not reason and at["phase"] != "train":
        reason = "evaluation"
    state: State = "discarded" if reason else "graded"
    masked = [s.versions[s.mask] for s in rollout.trajectory.segments if s.kind == "sampled" and s.mask.any()]
    oldest = min((int(versions.min()) for versions in masked), default=None)
    if _state(db, rollout.id) is None:
        _insert(db, rollout.id, at, rollout.task_id, oldest or 0)
    done = db.execute(
        "UPDATE states SET state = ?, reason = ?, attempt = ?, oldest = ? WHERE rollout_id = ?"
        f" AND (state IN ('planned', 'running') OR {_REPLACEABLE})",
        (state, reason, rollout.attempt, oldest, rollout.id),
    )
    if done.rowcount != 1:
        raise RecordError(f"rollout {rollout.id} cannot be stored: {_said(db, rollout.id)}")


def settle(
    db: sqlite3.Connection,
    step: int,
    ledger: Ledger,
    trained: Collection[str],
    discarded: Mapping[str, str],
) -> None:
    """Commit the fates of a step's rollouts, in the transaction that commits the step.

    Raises RecordError when one was not assigned to it, one that was has no fate, a reason is unknown, or the
    rollouts do not hold exactly the tokens of the step's ledger.
    """
    unknown = sorted(set(discarded.values()) - REASONS)
    if unknown:
        raise RecordError(f"step {step}: no such reason to discard a rollout: {unknown[0]!r}")
    mine = f"account = {int(step)}"
    move(db, trained, TAKEN, "state = 'trained'", f"AND {mine}")
    for reason in sorted(set(discarded.values())):
        ids = [rollout_id for rollout_id, why in discarded.items() if why == reason]
        change = f"state = 'discarded', reason = '{reason}', {mine}"
        move(db, ids, ("assigned", "discarded"), change, f"AND ({mine} OR account IS NULL)")
    left = db.execute(f"SELECT rollout_id FROM states WHERE state = 'assigned' AND {mine}").fetchone()
    if left is not None:
        raise RecordError(f"step {step}: rollout {left['rollout_id']} is neither trained nor discarded")
    held = accounted(db, step)
    captured, most = sum(x.captured for x in held), sum(x.trained for x in held)
    if captured != ledger.captured or ledger.trained > most:
        raise RecordError(
            f"step {step}: its ledger counts {ledger.captured} captured and {ledger.trained} trained tokens,"
            f" its rollouts hold {captured} and at most {most}"
        )


def accounted(db: sqlite3.Connection, step: int) -> list[Ledger]:
    """Ledgers of the rollouts in a step's account, as they were sealed."""
    rows = db.execute(
        "SELECT r.ledger FROM states s JOIN rollouts r USING (rollout_id) WHERE s.account = ?", (step,)
    ).fetchall()
    return [read_ledger(row["ledger"]) for row in rows]


def move(
    db: sqlite3.Connection, ids: Collection[str], of: Collection[State], change: str, further: str = ""
) -> None:
    """Change the rows of rollouts that are in one of the states `of`. Raises RecordError for any other."""
    allowed = ", ".join(f"'{state}'" for state in of)
    for rollout_id in ids:
        done = db.execute(
            f"UPDATE states SET {change} WHERE rollout_id = ? AND state IN ({allowed}) {further}",
            (rollout_id,),
        )
        if done.rowcount != 1:
            wanted = " or ".join(of)
            raise RecordError(f"rollout {rollout_id} is not {wanted}: {_said(db, rollout_id)}")


def _insert(
    db: sqlite3.Connection, rollout_id: str, at: Mapping[str, object], task_id: str, version: int
) -> None:
    values = {name: at[name] for name in ("phase", "step", "group_no", "slot")}
    values |= {"rollout_id": rollout_id, "task_id": task_id, "state": "planned", "reason": ""}
    insert(db, "states", values | {"attempt": 0, "version": version, "oldest": None, "account": None})


def _state(db: sqlite3.Connection, rollout_id: str) -> Row | None:
    row: Row | None = db.execute("SELECT * FROM states WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return row


def _said(db: sqlite3.Connection, rollout_id: str) -> str:
    """Where it stands, for an error."""
    row = _state(db, rollout_id)
    if row is None:
        return "the run knows nothing of it"
    told = f"it is {row['state']}"
    if row["reason"]:
        told += f" ({row['reason']})"
    return told if row["account"] is None else f"{told} by step {row['account']}"


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
