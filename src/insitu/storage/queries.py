"""Read-only queries over the store of a run: every SQL statement of the viewer and of `insitu.open_run`.

A `RunReader` is opened per use and closed at once: an open read would keep SQLite from truncating the log of
the process that writes. Statements are interrupted after `QUERY_S` seconds of CPU time.
"""

from __future__ import annotations

import functools
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from insitu.errors import RecordError
from insitu.storage.schema import GROUP_ID, TASK_SET
from insitu.storage.store import Store
from insitu.types import MALFORMED, PARTS_LEFT_OUT, UNKNOWN_TOOL, CallTimes

QUERY_S = 2.0
"""Most CPU time of a statement; its wall time may be ten times as long."""
PAGE = 200
"""Most rows of one page of rollouts."""
TIMES = tuple(CallTimes.__dataclass_fields__)
"""Columns of `turns` that measure a call."""
_PROGRESS_OPS = 20_000
_FILES = re.compile(
    r"(?<![\w:/.~-])(?:~|\.{1,2})?/[\w@.+~/-]+"
    r"|(?<![\w:/])[\w@.+~/-]*\w\.(?:c|cc|cfg|cpp|css|go|h|hpp|html|java|js|json|jsx|md|php|py|rb|rs|sh|sql|toml|ts"
    r"|tsx|txt|xml|ya?ml)\b"
)
_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{12,}|\d+")


def _labelled(label: str) -> str:
    """Return the condition that a turn of the rollout has a label of the gateway."""
    # Quotes inside of values are escaped, so no client metadata spells the pair.
    pair = f'["label","{label}"]'
    return f"(EXISTS (SELECT 1 FROM notes n WHERE n.rollout_id = r.rollout_id AND instr(n.hints, '{pair}')))"


TABLES = """
FROM rollouts r LEFT JOIN verdicts v USING (rollout_id) LEFT JOIN states s USING (rollout_id)
"""
ROW = f"""
SELECT r.rowid AS "row", r.rollout_id AS id, r.ulid, r.phase, r.step, {GROUP_ID} AS group_id,
  r.group_no AS "group", r.slot,
  {TASK_SET} AS task_set, r.task_id AS task, r.category, r.status, r.reward, r.attempt, r.error, r.timings,
  r.ledger, r.egress,
  v.outcome, v.trust, v.passed, v.total, v.reason, v.dropped_paths AS dropped,
  s.state, s.reason AS fate, s.version, s.oldest, s.account,
  COALESCE(r.calls, (SELECT COUNT(*) FROM turns t WHERE t.rollout_id = r.rollout_id)) AS calls,
  {", ".join(f"{_labelled(label)} AS {label}" for label in (MALFORMED, UNKNOWN_TOOL, PARTS_LEFT_OUT))}
"""
FILTERS: Mapping[str, str] = {
    "phase": "r.phase = :phase",
    "step": "r.step = :step",
    "account": "s.account = :account",
    "group_id": f"{GROUP_ID} = :group_id",
    "task_set": f"{TASK_SET} = :task_set",
    "task": "r.task_id = :task",
    "category": "r.category = :category",
    "status": "r.status = :status",
    "outcome": "COALESCE(v.outcome, 'none') = :outcome",
    "trust": "v.trust = :trust",
    "state": "s.state = :state",
    "fate": "s.reason = :fate",
    "excluded": "json_extract(r.ledger, '$.excluded.' || :excluded) > 0",
    "why": "varying(v.reason) = :why",
    "error": "varying(r.error) = :error",
    "solved": "COALESCE(r.reward >= 1.0, 0) = :solved",
    "min_reward": "r.reward >= :min_reward",
    "max_reward": "r.reward <= :max_reward",
    "dropped": "(v.dropped_paths <> '[]') = :dropped",
    "egress": "(COALESCE(r.egress, 0) > 0) = :egress",
    "retried": "(r.attempt > 1) = :retried",
    "malformed": f"{_labelled(MALFORMED)} = :malformed",
    "unknown_tool": f"{_labelled(UNKNOWN_TOOL)} = :unknown_tool",
    "parts_left_out": f"{_labelled(PARTS_LEFT_OUT)} = :parts_left_out",
    "unparsed": f"({_labelled(MALFORMED)} OR {_labelled(UNKNOWN_TOOL)}) = :unparsed",
    "q": "(r.rollout_id LIKE :q ESCAPE '\\' OR r.task_id LIKE :q ESCAPE '\\' OR r.error LIKE :q ESCAPE '\\'"
    " OR v.reason LIKE :q ESCAPE '\\')",
}
"""Filter of a list of rollouts -> condition. `outcome` none = not graded; `q` = in id, task or reason."""
NUMBERS = {"step", "account", "solved", "min_reward", "max_reward", "dropped", "egress", "retried"}
NUMBERS |= {MALFORMED, UNKNOWN_TOOL, PARTS_LEFT_OUT, "unparsed"}
"""Filters whose value is a number; the others are text."""
SORTS: Mapping[str, str] = {
    "id": "r.rollout_id",
    "task_set": TASK_SET,
    "task": "r.task_id",
    "status": "r.status",
    "outcome": "COALESCE(v.outcome, '')",
    "step": "r.step",
    "reward": "COALESCE(r.reward, -1e9)",
    "attempt": "r.attempt",
    "egress": "COALESCE(r.egress, -1)",
    "version": "COALESCE(s.oldest, -1)",
    "calls": "COALESCE(r.calls, (SELECT COUNT(*) FROM turns t WHERE t.rollout_id = r.rollout_id))",
    "sampled": "json_extract(r.ledger, '$.captured')",
    "trained": "json_extract(r.ledger, '$.trained')",
    **{
        name: f"COALESCE(json_extract(r.timings, '$.{name}'), 0)"
        for name in ("queued_s", "agent_s", "engine_s", "grade_s", "total_s")
    },
}
"""Sort key of a list of rollouts -> expression that is never NULL. Without one: newest first."""

STATES = "SELECT state, reason, COUNT(*) AS n FROM states GROUP BY state, reason ORDER BY n DESC"
STEPS = "SELECT * FROM steps WHERE step > :after ORDER BY step"
ONE_STEP = """
SELECT s.*, (SELECT tokens FROM ledger l WHERE l.step = s.step AND l.entry = 'captured') AS captured
FROM steps s WHERE s.step = :step
"""
LEDGER = """
SELECT entry, json_group_array(step) AS steps, json_group_array(tokens) AS tokens
FROM ledger WHERE step > :after GROUP BY entry ORDER BY entry
"""
STEP_LEDGER = "SELECT entry, tokens FROM ledger WHERE step = :step"
STEP_SCORES = """
SELECT s.account AS step, SUM(r.reward >= 1.0) AS solved, COUNT(*) AS total, SUM(r.reward) AS reward_sum
FROM states s JOIN rollouts r USING (rollout_id)
WHERE s.account IS NOT NULL AND r.reward IS NOT NULL GROUP BY s.account ORDER BY s.account
"""
HELDOUT_TASKS = f"""
SELECT phase, step, category, SUM(reward >= 1.0) AS resolved, COUNT(*) AS graded, SUM(reward) AS reward_sum
FROM rollouts WHERE phase <> 'train' AND reward IS NOT NULL
GROUP BY phase, step, category, {TASK_SET}, task_id
ORDER BY step, phase LIKE 'eval_after%', phase
"""
WHY = """
SELECT status, outcome, varying(raw) AS text, SUM(n) AS n, MAX(example) AS example,
  MIN(first_step) AS first_step, MAX(last_step) AS last_step, MAX(of_error) AS of_error
FROM (SELECT r.status, v.outcome, COALESCE(NULLIF(v.reason, ''), r.error) AS raw, COUNT(*) AS n,
  MAX(r.rollout_id) AS example, MIN(r.step) AS first_step, MAX(r.step) AS last_step,
  NULLIF(v.reason, '') IS NULL AS of_error
  FROM rollouts r LEFT JOIN verdicts v USING (rollout_id) WHERE COALESCE(r.reward, 0) < 1.0 GROUP BY 1, 2, 3)
GROUP BY status, outcome, text ORDER BY n DESC LIMIT 60
"""
FACETS = f"""
SELECT {TASK_SET} AS task_set, r.phase, r.status, COALESCE(v.outcome, 'none') AS outcome, COUNT(*) AS n
FROM rollouts r LEFT JOIN verdicts v USING (rollout_id) GROUP BY 1, 2, 3, 4
"""
CATEGORIES = "SELECT category, COUNT(*) AS n FROM rollouts GROUP BY category ORDER BY n DESC LIMIT 50"
RUNNING = """
SELECT rollout_id AS id, phase, step, task_id AS task, attempt, version FROM states WHERE state = 'running'
ORDER BY phase, step, group_no, slot LIMIT 200
"""
STEP_ROWS = f"{ROW} {TABLES} WHERE s.account = :step ORDER BY r.step, r.group_no, r.slot LIMIT 5000"
GROUP_ROWS = (
    f"{ROW} {TABLES} WHERE r.phase = :phase AND r.step = :step AND r.group_no = :group ORDER BY r.slot"
)
TASK_ROWS = f"{ROW} {TABLES} WHERE r.task_id = :task ORDER BY r.rowid LIMIT 2000"
ONE_ROW = f"{ROW} {TABLES} WHERE r.rollout_id = :id"
GROUP_STATES = """
SELECT rollout_id AS id, slot, state, reason AS fate, attempt FROM states
WHERE phase = :phase AND step = :step AND group_no = :group ORDER BY slot
"""
ROLLOUT = "SELECT * FROM rollouts WHERE rollout_id = :id"
STATE = "SELECT * FROM states WHERE rollout_id = :id"
UNCOUNTED = """
SELECT r.rollout_id AS id, r.step, r.group_no AS "group", s.reason FROM rollouts r
JOIN states s USING (rollout_id) WHERE r.phase = 'train' AND s.account IS NULL
ORDER BY r.step, r.group_no, r.slot
"""
IDS = "SELECT rollout_id AS id FROM states ORDER BY rowid DESC LIMIT 5000"
VERDICT = "SELECT * FROM verdicts WHERE rollout_id = :id"
NOTES = "SELECT drifts, hints FROM notes WHERE rollout_id = :id"
ATTEMPTS = "SELECT * FROM attempts WHERE rollout_id = :id ORDER BY attempt"
FILES = "SELECT path, executable, length(content) AS size FROM files WHERE rollout_id = :id ORDER BY path"
FILE = "SELECT content, executable FROM files WHERE rollout_id = :id AND path = :path"
TURN_HEADS = f"""
SELECT position, turn, parent, finish, version_runs, excluded, length(context_ids) / 4 AS fresh,
  length(ids) / 4 AS sampled, logprobs IS NOT NULL AS has_logprobs, {", ".join(TIMES)}
FROM turns WHERE rollout_id = :id ORDER BY position
"""
TURN_IDS = """
SELECT turn, parent, finish, context_ids, ids, spans FROM turns
WHERE rollout_id = :id AND position >= :start ORDER BY position LIMIT :count
"""
TURNS_BEFORE = """
SELECT rowid AS "row", rollout_id AS id, turn, context_ids, ids FROM turns
WHERE rowid < :before ORDER BY rowid DESC LIMIT :count
"""
SEGMENT_HEADS = """
SELECT rowid AS "row", position, segment, kind, label, length(mask) AS tokens,
  length(versions) / 4 AS masked, length(logprobs) / 4 AS logprobs
FROM segments WHERE rollout_id = :id ORDER BY position
"""
TURN_ROWS = 'SELECT rowid AS "row" FROM turns WHERE rollout_id = :id AND turn = :turn'
SAME_TASK = f"""
SELECT rollout_id AS id, phase, step, slot, reward FROM rollouts
WHERE task_id = :task AND {TASK_SET} = :task_set AND phase = :phase
ORDER BY step, group_no, slot
"""
NEXT_ROW = "SELECT rollout_id AS id FROM rollouts WHERE rowid > :row ORDER BY rowid LIMIT 1"
PREVIOUS_ROW = "SELECT rollout_id AS id FROM rollouts WHERE rowid < :row ORDER BY rowid DESC LIMIT 1"
TASKS = f"""
SELECT {TASK_SET} AS task_set, task_id AS task, category, COUNT(*) AS n,
  SUM(COALESCE(reward, 0) >= 1.0) AS solved,
  SUM(reward IS NULL) AS failed, COALESCE(SUM(reward), 0) AS reward_sum, MIN(step) AS first_step,
  MAX(step) AS last_step, MAX(CASE WHEN reward >= 1.0 THEN step END) AS last_solved
FROM rollouts WHERE phase = :phase GROUP BY task_set, task_id ORDER BY task_id, MIN(rowid)
"""
TASK_CELLS = f"""
SELECT {TASK_SET} AS task_set, task_id AS task, phase, step, MIN(group_no) AS "group", COUNT(*) AS n,
  COUNT(reward) AS graded, COALESCE(SUM(reward >= 1.0), 0) AS solved
FROM rollouts WHERE phase = :phase OR (:held AND phase GLOB 'eval*') GROUP BY 1, 2, 3, 4 ORDER BY step
"""
STEP_SPAN = "SELECT MIN(step) AS first, MAX(step) AS last FROM rollouts WHERE phase = :phase"
FAILURES = """
SELECT varying(error) AS text, COUNT(*) AS n, MIN(rollout_id) AS first, MAX(rollout_id) AS last,
  error AS example FROM attempts WHERE status = 'infra_failed' GROUP BY 1 ORDER BY n DESC LIMIT 100
"""
STATUS_OUTCOME = """
SELECT r.status, COALESCE(v.outcome, 'none') AS outcome, COUNT(*) AS n
FROM rollouts r LEFT JOIN verdicts v USING (rollout_id) GROUP BY 1, 2
"""
DIFF = "SELECT text FROM diffs WHERE rollout_id = :id"
LANES = """
SELECT r.rollout_id AS id, r.phase, r.step, r.timings, r.ulid, a.began_s, a.ended_s
FROM rollouts r LEFT JOIN attempts a USING (rollout_id, attempt) ORDER BY r.rowid DESC LIMIT 400
"""
WAITS = "SELECT phase, step, timings, ulid FROM rollouts ORDER BY rowid DESC LIMIT 20000"
SLOWEST = (
    f"{ROW} {TABLES} WHERE r.rowid IN (SELECT rowid FROM rollouts ORDER BY"
    " json_extract(timings, '$.total_s') DESC LIMIT 20) ORDER BY json_extract(r.timings, '$.total_s') DESC"
)
PAIRS = f"""
SELECT {TASK_SET} AS task_set, task_id AS task, rollout_id AS id, reward FROM rollouts
WHERE phase = :phase AND step = :step AND reward IS NOT NULL ORDER BY task_set, task_id, slot
"""
PHASES = (
    "SELECT phase, step, COUNT(*) AS n, MIN(rowid) AS first FROM rollouts GROUP BY phase, step ORDER BY first"
)
WATCH = """
SELECT (SELECT MAX(rowid) FROM rollouts) AS rollouts, (SELECT MAX(step) FROM steps) AS steps,
  (SELECT COUNT(*) FROM states WHERE state = 'running') AS running
"""
NEW_ROLLOUTS = """
SELECT rowid AS "row", rollout_id AS id, reward, json_extract(ledger, '$.captured') AS sampled
FROM rollouts WHERE rowid > :row ORDER BY rowid LIMIT 5000
"""
LAST_ROLLOUT = "SELECT ulid FROM rollouts ORDER BY rowid DESC LIMIT 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """One page of a list of rollouts."""

    rows: list[dict[str, Any]]
    next: str
    """Cursor of the following page; empty at the end."""


class RunReader(Store):
    """Read-only store with the queries of this module; a context manager."""

    def __init__(self, run_dir: Path, *, query_s: float = QUERY_S) -> None:
        """Open the store of a run directory; raise RecordError when it has none that can be read."""
        path = run_dir / "run.sqlite"
        if not path.exists():
            raise RecordError(f"{run_dir} holds no rollouts yet: it has no run.sqlite")
        self.run_dir = run_dir
        self._query_s = query_s
        self._ends_s = self._ends_cpu_s = 0.0
        self._step_scores: list[dict[str, Any]] | None = None
        super().__init__(path, readonly=True)
        self._db.create_function("varying", 1, varying, deterministic=True)
        self._db.set_progress_handler(self._late, _PROGRESS_OPS)

    def _reading(self) -> Any:
        self._ends_s = time.monotonic() + 10 * self._query_s
        self._ends_cpu_s = time.thread_time() + self._query_s
        return super()._reading()

    def _late(self) -> bool:
        return time.thread_time() > self._ends_cpu_s or time.monotonic() > self._ends_s

    def all(self, query: str, **values: object) -> list[dict[str, Any]]:
        """Return the rows of one of this module's queries."""
        with self._reading() as db:
            return [dict(row) for row in db.execute(query, values).fetchall()]

    def step_scores(self) -> list[dict[str, Any]]:
        """Return STEP_SCORES of all steps; read once."""
        if self._step_scores is None:
            self._step_scores = self.all(STEP_SCORES)
        return self._step_scores

    def one(self, query: str, **values: object) -> dict[str, Any] | None:
        """Return the first row of one of this module's queries, or None."""
        return next(iter(self.all(query, **values)), None)

    def rows(self, query: str, **values: object) -> list[dict[str, Any]]:
        """Return rollouts of a query that selects list rows, decoded."""
        return [_read_row(row) for row in self.all(query, **values)]

    def page(
        self, filters: Mapping[str, object], *, sort: str = "", cursor: str = "", limit: int = PAGE
    ) -> RolloutPage:
        """Return one page of rollouts, newest first or by `sort`, a key of SORTS; "-" before it = descending.

        Raises RecordError for an unknown filter, sort or cursor.
        """
        where, values = _conditions(filters)
        descending = not sort or sort.startswith("-")
        key = sort.removeprefix("-")
        if key and key not in SORTS:
            raise RecordError(f"no such sort: {key}; there are: {', '.join(SORTS)}")
        expression, way = (SORTS[key] if key else "r.rowid"), "DESC" if descending else "ASC"
        if cursor:
            where.append(f"({expression}, r.rowid) {'<' if descending else '>'} (:at, :at_row)")
            values |= _read_cursor(cursor)
        condition = f"WHERE {' AND '.join(where)}" if where else ""
        # First which rows, then what is in them: sorting whole rows of a large run takes seconds.
        found = self.all(
            f"WITH top AS MATERIALIZED (SELECT r.rowid AS at, {expression} AS sort_key {TABLES} {condition}"
            f" ORDER BY {expression} {way}, r.rowid {way} LIMIT :limit) {ROW}, top.sort_key"
            f" {TABLES.replace('FROM', 'FROM top CROSS JOIN', 1)} WHERE r.rowid = top.at"
            f" ORDER BY top.sort_key {way}, r.rowid {way}",
            **values,
            limit=limit,
        )
        last = found[-1] if len(found) == limit else None
        after = "" if last is None else orjson.dumps([last["sort_key"], last["row"]]).decode()
        return RolloutPage(rows=[_read_row(row) for row in found], next=after)

    def count(self, filters: Mapping[str, object]) -> int:
        """Return the number of rollouts that pass the filters."""
        where, values = _conditions(filters)
        if not where:
            return int(self.all("SELECT COUNT(*) AS n FROM rollouts")[0]["n"])
        found = self.all(f"SELECT COUNT(*) AS n {TABLES} WHERE {' AND '.join(where)}", **values)
        return int(found[0]["n"])

    def window(self, table: str, column: str, row: int, start: int, count: int) -> bytes:
        """Return bytes `start` to `start + count` of a blob of `segments` or `turns`."""
        with self._reading() as db, db.blobopen(table, column, row, readonly=True) as blob:
            blob.seek(min(start, len(blob)))
            return bytes(blob.read(count))


def _read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a list row with its JSON columns decoded, times from the id, and token counts."""
    found = {key: value for key, value in row.items() if key not in ("ledger", "timings", "sort_key", "ulid")}
    ledger, timings = orjson.loads(row["ledger"]), orjson.loads(row["timings"])
    found["dropped"] = orjson.loads(row["dropped"] or "[]")
    found["ended_s"] = ulid_seconds(row["ulid"])
    found |= {"sampled": ledger["captured"], "trained": ledger["trained"], "excluded": ledger["excluded"]}
    return {**found, **timings}


def read_attempt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of ATTEMPTS with its JSON columns decoded."""
    found = {name: value for name, value in row.items() if name not in ("rollout_id", "schema_version")}
    return found | {name: orjson.loads(row[name]) for name in ("timings", "ledger")}


def ulid_seconds(ulid: str) -> float:
    """Return the time of a ULID in seconds since the epoch: when its rollout was stored."""
    alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    value = 0
    for letter in ulid[:10]:
        value = value * 32 + max(0, alphabet.find(letter))
    return value / 1000


@functools.lru_cache(maxsize=1 << 16)
def varying(text: str | None) -> str:
    """Return a text with # for numbers and hashes and FILE for paths, so that equal causes are equal."""
    return "" if text is None else _VARYING.sub("#", _FILES.sub("FILE", text))


def _conditions(filters: Mapping[str, object]) -> tuple[list[str], dict[str, object]]:
    unknown = sorted(set(filters) - set(FILTERS))
    if unknown:
        raise RecordError(f"no such filter: {unknown[0]}; there are: {', '.join(FILTERS)}")
    values = dict(filters)
    if "q" in values:
        text = re.sub(r"([\\%_])", r"\\\1", str(values["q"]))
        values["q"] = f"%{text}%"
    return [FILTERS[name] for name in filters], values


def _read_cursor(cursor: str) -> dict[str, object]:
    try:
        at, row = orjson.loads(cursor)
    except (ValueError, TypeError) as error:
        raise RecordError("the cursor of the page is not valid") from error
    if not isinstance(at, str | int | float) or not isinstance(row, int):
        raise RecordError("the cursor of the page is not valid")
    return {"at": at, "at_row": row}


def interrupted(error: BaseException) -> bool:
    """Return whether an error is a query that took longer than it may."""
    return isinstance(error.__cause__, sqlite3.OperationalError) and "interrupted" in str(error.__cause__)
