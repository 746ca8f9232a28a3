"""Counts of attempts by how they ended.

A finished attempt has a row in `attempts`. An attempt that was running when the process died gets a row with
an empty ledger when the run is resumed (`Lifecycle.recover`) and is repeated under the next number.
"""

from __future__ import annotations

import sqlite3
from typing import Literal, get_args

from insitu.storage.rollout_rows import dumps, insert
from insitu.types import Status

CANCELLED, INTERRUPTED = "cancelled: ", "interrupted: "
"""Prefixes of the error of such an attempt."""
_WHY = "the process that ran it ended first"
End = Literal["decided", "failed", "cancelled", "interrupted", "running"]
ENDS: tuple[End, ...] = get_args(End)
"""`failed`: infrastructure failure, whether or not it was the rollout's last attempt. `cancelled`: stale
group, deadline or end of the run."""


def interrupt_running(db: sqlite3.Connection) -> None:
    """Record running attempts as interrupted, in the transaction that plans them again."""
    running = (
        "SELECT s.rollout_id, s.attempt FROM states s LEFT JOIN attempts a USING (rollout_id, attempt)"
        " WHERE s.state = 'running' AND a.rollout_id IS NULL"
    )
    nothing = {"timings": "{}", "ledger": dumps({"captured": 0, "trained": 0, "excluded": {}})}
    for row in db.execute(running).fetchall():
        values = {"rollout_id": row["rollout_id"], "attempt": row["attempt"], "egress": None}
        how = {"status": Status.INFRA_FAILED.value, "error": INTERRUPTED + _WHY}
        insert(db, "attempts", values | how | nothing)


def count_attempts(db: sqlite3.Connection) -> dict[str, int]:
    """Count attempts by end, zeros included."""
    # An empty error is most frequent, and cheaper to compare than a prefix.
    how = (
        f"CASE WHEN error = '' AND status <> '{Status.INFRA_FAILED.value}' THEN 'decided'"
        f" WHEN error LIKE '{CANCELLED}%' THEN 'cancelled' WHEN error LIKE '{INTERRUPTED}%' THEN"
        f" 'interrupted' WHEN status = '{Status.INFRA_FAILED.value}' THEN 'failed' ELSE 'decided' END"
    )
    counts: dict[str, int] = dict.fromkeys(ENDS, 0)
    for row in db.execute(f"SELECT {how} AS how, COUNT(*) AS n FROM attempts GROUP BY how"):
        counts[row["how"]] = row["n"]
    counts["running"] = db.execute(
        "SELECT COUNT(*) AS n FROM states s LEFT JOIN attempts a USING (rollout_id, attempt)"
        " WHERE s.state = 'running' AND a.rollout_id IS NULL"
    ).fetchone()["n"]
    return counts
