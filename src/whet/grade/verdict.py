"""Builds the Verdict, the only thing that leaves grading. A reward exists unless the host itself failed."""

from __future__ import annotations

from whet.grade.diff import Diff
from whet.grade.runners.base import RunReport
from whet.types import Outcome, Strength, Verdict

MAX_REASON_CHARS = 300


def make_verdict(
    report: RunReport, *, strength: Strength, task_hash: str, diff: Diff | None, duration_s: float
) -> Verdict:
    """Reward is 1.0 when resolved, None when infra, else 0.0: there is no partial credit."""
    reward = 1.0 if report.outcome is Outcome.RESOLVED else 0.0
    reason = report.reason
    if diff is not None and diff.suspicious:
        reason += "; shadows the standard library: " + ", ".join(diff.suspicious)
    return Verdict(
        outcome=report.outcome,
        reward=None if report.outcome is Outcome.INFRA else reward,
        strength=strength,
        passed=report.passed,
        total=report.total,
        dropped_paths=() if diff is None else diff.dropped,
        reason=reason[:MAX_REASON_CHARS],
        task_hash=task_hash,
        diff_hash="" if diff is None else diff.digest,
        duration_s=duration_s,
    )
