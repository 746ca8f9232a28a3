"""How an attempt is bounded and how it ended: limits, whether it is graded at all, its status; pure."""

from __future__ import annotations

from insitu.agents.base import AgentResult
from insitu.gateway.session import SessionStats
from insitu.types import Limits, Outcome, Status, Verdict

WAITED_SHARE = 0.1
"""Share of the wall limit spent waiting for rate limits above which a timeout is not graded."""


def infra_failure(result: AgentResult, stats: SessionStats, limits: Limits) -> str:
    """Return why an attempt is not graded; empty if it is."""
    if stats.infra_error:
        return stats.infra_error
    if not stats.calls:  # nothing that the model sampled has led to this end
        end = result.detail or "it ended without an error"
        refused = stats.rejections
        if refused.count:
            return f"the gateway refused all {refused.count} requests of the agent ({refused.last}): {end}"
        return f"the agent never called the model: {end}"
    if result.exit == "timeout" and stats.waited_s >= WAITED_SHARE * limits.wall_s:
        return f"agent timeout; {stats.waited_s:.0f} s of it were waits for the provider"
    return ""


def ungraded(verdict: Verdict) -> str | None:
    """Return why a verdict is unusable; None if it has a valid reward."""
    # A grader without a valid reward has failed: that is not the agent's fault.
    if verdict.outcome is Outcome.INFRA:
        return verdict.reason
    if verdict.reward is None or not 0.0 <= verdict.reward <= 1.0:
        return f"the grader returned reward {verdict.reward}, expected a number from 0 to 1"
    return None


def status_of(result: AgentResult, stats: SessionStats) -> Status:
    if result.exit == "timeout" or stats.budget_stop or stats.truncated:
        return Status.TRUNCATED
    return Status.OK if result.exit == "finished" else Status.AGENT_FAILED
