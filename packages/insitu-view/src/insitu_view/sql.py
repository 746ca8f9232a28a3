"""SQL of the user over documented views of a run's store, read-only and bounded."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import RecordError
from insitu.storage.queries import TIMES, RunReader
from insitu.storage.run_dir import KIND, read_config
from insitu.storage.schema import GROUP_ID, TASK_SET

SQL_S = 10.0
"""Most CPU time of one statement."""
VIEWS = f"""
CREATE TEMP VIEW v_rollouts AS
SELECT r.rollout_id AS id, r.phase, r.step, {GROUP_ID} AS group_id, r.slot,
  {TASK_SET} AS task_set, r.task_id AS task, r.category, agent_of(r.part) AS agent, r.status,
  v.outcome, r.reward, v.passed, v.total, v.trust, v.reason, r.error, s.state, s.reason AS fate,
  s.account AS counted_by, s.oldest AS version, r.attempt, r.egress,
  COALESCE(r.calls, (SELECT COUNT(*) FROM turns t WHERE t.rollout_id = r.rollout_id)) AS calls,
  json_extract(r.ledger, '$.captured') AS sampled, json_extract(r.ledger, '$.trained') AS trained,
  json_extract(r.timings, '$.queued_s') AS queued_s, json_extract(r.timings, '$.agent_s') AS agent_s,
  json_extract(r.timings, '$.engine_s') AS engine_s, json_extract(r.timings, '$.grade_s') AS grade_s,
  json_extract(r.timings, '$.total_s') AS total_s
FROM rollouts r LEFT JOIN verdicts v USING (rollout_id) LEFT JOIN states s USING (rollout_id);
CREATE TEMP VIEW v_turns AS
SELECT rollout_id AS id, turn, parent, finish, excluded, length(context_ids) / 4 AS context_tokens,
  length(ids) / 4 AS sampled, {", ".join(TIMES)} FROM turns;
CREATE TEMP VIEW v_steps AS
SELECT s.step, s.committed_s, s.checkpoint, s.plan_hash, s.metrics,
  (SELECT tokens FROM ledger l WHERE l.step = s.step AND l.entry = 'captured') AS sampled,
  (SELECT tokens FROM ledger l WHERE l.step = s.step AND l.entry = 'trained') AS trained
FROM steps s;
CREATE TEMP VIEW v_attempts AS
SELECT rollout_id AS id, attempt, status, error, egress, began_s, ended_s,
  json_extract(ledger, '$.captured') AS sampled, json_extract(timings, '$.total_s') AS total_s FROM attempts
"""
NAMES = ("v_rollouts", "v_turns", "v_steps", "v_attempts")
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_REASONS = {
    "not authorized": "only SELECT is allowed",
    "access to": "only SELECT is allowed",
    "interrupted": f"it took longer than {SQL_S:g} s of CPU time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """Result of a statement."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    """Bytes are replaced by their number."""
    cut: bool
    """There are more rows than the limit."""


class SqlReader(RunReader):
    """Reader that runs one SELECT of the user at a time."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, query_s=SQL_S)
        # Sessions of `insitu serve` are of agents that no configuration names.
        config = None if self.meta().get(KIND) == "serve" else read_config(run_dir)

        @functools.cache
        def agent_of(part: str | None) -> str | None:
            return config.agent_of(part or "") or None if config else None

        self._db.create_function("agent_of", 1, agent_of, deterministic=True)
        with self._reading() as db:
            db.execute("PRAGMA temp_store = MEMORY")
            for statement in VIEWS.split(";\n"):
                db.execute(statement)
            db.set_authorizer(_authorize)

    def select(self, statement: str, limit: int) -> QueryResult:
        """Return at most `limit` rows; raise RecordError with the reason when the statement is refused."""
        try:
            with self._reading() as db:
                found = db.execute(statement)
                columns = [column[0] for column in found.description or ()]
                rows = found.fetchmany(limit + 1)
        except (RecordError, sqlite3.Warning) as error:
            reason = str(error.__cause__ or error)
            reason = next(
                (message for start, message in _REASONS.items() if reason.startswith(start)), reason
            )
            raise RecordError(f"the query failed: {reason}; views: {', '.join(NAMES)}") from error
        if not columns:
            raise RecordError(f"the query holds no statement; views: {', '.join(NAMES)}")
        return QueryResult(
            columns=columns, rows=[_readable(row) for row in rows[:limit]], cut=len(rows) > limit
        )


def _authorize(action: int, name: str | None, detail: str | None, *_: object) -> int:
    allowed = action in _ALLOWED and detail != "load_extension"
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _readable(row: Sequence[object]) -> list[object]:
    return [f"<{len(value)} bytes>" if isinstance(value, bytes) else value for value in row]
