"""Queries of the viewer alone: evidence of cheating, the rollouts that tell most about a run, pictures."""

from __future__ import annotations

from collections.abc import Mapping

from insitu.storage.queries import ROW, TABLES

LIST = f"{ROW} {TABLES}"
_SUSPECTS = {
    "tampered": "v.outcome = 'tampered'",
    "protected paths changed": "v.dropped_paths <> '[]' AND v.outcome <> 'tampered'",
    "network attempts": "r.egress > 0",
    "rewarded by a weak verdict": "v.trust = 'weak' AND r.reward > 0",
    "solved without a change": "v.outcome = 'resolved' AND r.deleted = '[]'"
    " AND NOT EXISTS (SELECT 1 FROM files f WHERE f.rollout_id = r.rollout_id)",
    "solved, test files changed": "v.outcome = 'resolved' AND EXISTS"
    " (SELECT 1 FROM files f WHERE f.rollout_id = r.rollout_id AND f.path LIKE '%test%')",
    "solved in one call": "v.outcome = 'resolved'"
    " AND COALESCE(r.calls, (SELECT COUNT(*) FROM turns t WHERE t.rollout_id = r.rollout_id)) = 1",
}
SUSPECTS: Mapping[str, str] = {
    name: f"{LIST} WHERE {condition} ORDER BY r.rowid DESC LIMIT 50" for name, condition in _SUSPECTS.items()
}
"""Evidence of cheating -> query of its newest rollouts."""
SUSPECT_COUNTS: Mapping[str, str] = {
    name: f"SELECT COUNT(*) AS n {TABLES} WHERE {condition}" for name, condition in _SUSPECTS.items()
}
SHARED_DIFFS = """
SELECT v.diff_hash, COUNT(DISTINCT r.task_id) AS tasks, COUNT(*) AS n, MIN(r.rollout_id) AS example
FROM verdicts v JOIN rollouts r USING (rollout_id) WHERE v.outcome = 'resolved' AND v.diff_hash <> ''
GROUP BY v.diff_hash HAVING tasks > 1 ORDER BY n DESC LIMIT 100
"""
STEP_CONTEXT = """
SELECT rollout_id AS id, SUM(length(context_ids)) / 4 AS context FROM states JOIN turns USING (rollout_id)
WHERE account = :step GROUP BY 1
"""
"""New prompt tokens of the turns of each rollout of a step."""
TELLING: Mapping[str, str] = {
    "the agent tampered with the tests": f"{LIST} WHERE r.rollout_id IN"
    " (SELECT rollout_id FROM verdicts WHERE outcome = 'tampered') ORDER BY r.rowid DESC LIMIT 2",
    "newest solved": f"{LIST} WHERE r.reward >= 1.0 AND +r.phase = 'train' ORDER BY r.rowid DESC LIMIT 1",
    "newest unsolved": f"{LIST} WHERE r.reward < 1.0 AND +r.phase = 'train' ORDER BY r.rowid DESC LIMIT 1",
    "solved with the fewest tokens": f"{LIST} WHERE r.rowid = (SELECT rowid FROM rollouts"
    " WHERE reward >= 1.0 ORDER BY json_extract(ledger, '$.captured') LIMIT 1)",
    "most tokens sampled": f"{LIST} WHERE r.rowid = (SELECT rowid FROM rollouts"
    " ORDER BY json_extract(ledger, '$.captured') DESC LIMIT 1)",
    "slowest": f"{LIST} WHERE r.rowid = (SELECT rowid FROM rollouts"
    " ORDER BY json_extract(timings, '$.total_s') DESC LIMIT 1)",
    "latest first solve of a task": f"{LIST} WHERE r.rowid = (SELECT MAX(f) FROM (SELECT MIN(rowid)"
    " AS f FROM rollouts WHERE phase = 'train' AND reward >= 1.0 GROUP BY task_id))",
    "a held-out task that was solved before and is not now": f"{LIST} WHERE r.phase LIKE 'eval%'"
    " AND r.reward < 1.0 AND EXISTS (SELECT 1 FROM rollouts o WHERE o.phase LIKE 'eval%'"
    " AND o.rowid < r.rowid AND o.task_id = r.task_id AND o.reward >= 1.0) ORDER BY r.rowid DESC LIMIT 1",
    "cut off at a limit": f"{LIST} WHERE r.status = 'truncated' ORDER BY r.rowid DESC LIMIT 1",
    "the agent failed": f"{LIST} WHERE r.status = 'agent_failed' ORDER BY r.rowid DESC LIMIT 1",
    "infrastructure failure": f"{LIST} WHERE r.status = 'infra_failed' ORDER BY r.rowid DESC LIMIT 1",
    "network attempt": f"{LIST} WHERE r.egress > 0 ORDER BY r.rowid DESC LIMIT 1",
}
"""Why a rollout is worth reading -> query that finds it. `+r.phase` keeps the order of the rowids."""
