"""The account of tries: each that was begun has ended in a named way, or is under way.

A try's end is a row of `attempts`. One that was under way when the process ended gets its row when the run is
resumed (`States.recover`): nothing of it is known, its tokens least of all, and it is made again under the
next number. Called by states.py, store.py and `insitu show`.
"""

from __future__ import annotations

import sqlite3
from typing import Literal, get_args

from insitu.storage.rollout_rows import dumps, has_table, insert
from insitu.types import Status

CANCELLED, INTERRUPTED = "cancelled: ", "interrupted: "
"""How the error of such a try begins."""
_WHY = "the process that ran it ended first"
End = Literal["decided", "failed", "cancelled", "interrupted", "running", "untold"]
ENDS: tuple[End, ...] = get_args(End)
"""`failed`: of the infrastructure, the last try of a rollout or not. `cancelled`: its group was stale, its
time over or the run at its end. `untold`: begun, and nothing is known of its end: only in directories that a
insitu before this account has resumed."""


def interrupt_running(db: sqlite3.Connection) -> None:
    """Give what was under way its end, in the transaction that plans it again."""
    under_way = (
        "SELECT s.rollout_id, s.attempt FROM states s LEFT JOIN attempts a USING (rollout_id, attempt)"
        " WHERE s.state = 'running' AND a.rollout_id IS NULL"
    )
    nothing = {"timings": "{}", "ledger": dumps({"captured": 0, "trained": 0, "excluded": {}})}
    for row in db.execute(under_way).fetchall():
        values = {"rollout_id": row["rollout_id"], "attempt": row["attempt"], "egress": None}
        how = {"status": Status.INFRA_FAILED.value, "error": INTERRUPTED + _WHY}
        insert(db, "attempts", values | how | nothing)


def count_tries(db: sqlite3.Connection) -> dict[str, int]:
    """Tries by their end; every end is there. Empty for a directory of an older insitu."""
    if not has_table(db, "states"):
        return {}
    how = (
        f"CASE WHEN error LIKE '{CANCELLED}%' THEN 'cancelled' WHEN error LIKE '{INTERRUPTED}%' THEN"
        f" 'interrupted' WHEN status = '{Status.INFRA_FAILED.value}' THEN 'failed' ELSE 'decided' END"
    )
    found: dict[str, int] = dict.fromkeys(ENDS, 0)
    for row in db.execute(f"SELECT {how} AS how, COUNT(*) AS n FROM attempts GROUP BY how"):
        found[row["how"]] = row["n"]
    found["running"] = db.execute(
        "SELECT COUNT(*) AS n FROM states s LEFT JOIN attempts a USING (rollout_id, attempt)"
        " WHERE s.state = 'running' AND a.rollout_id IS NULL"
    ).fetchone()["n"]
    known = "SELECT rollout_id, attempt AS n FROM attempts UNION ALL SELECT rollout_id, attempt FROM states"
    last = f"SELECT MAX(n) AS n FROM ({known}) GROUP BY rollout_id"
    begun = db.execute(f"SELECT COALESCE(SUM(n), 0) AS n FROM ({last})").fetchone()["n"]
    found["untold"] = begun - sum(found.values())
    return found
