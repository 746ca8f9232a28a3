"""The share of attempts that failed of the infrastructure and are neither scored nor trained.

A policy could learn to cause such failures, which cost nothing. So the share is a metric of every step,
overall and per task; a step with failures has a notice that names the last, and a high share is an alarm.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from insitu.types import Rollout, Status

log = logging.getLogger(__name__)

LEAST_TRIES = 8
"""Least attempts of a step for an alarm."""
LEAST_OF_TASK = 4
"""Least attempts of a task."""
NAMED = 3
"""Most tasks that an alarm names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InfraFailures:
    """Counts of one step."""

    tries: int
    masked: int
    worst: Sequence[tuple[str, int, int]]
    """(task, failures, attempts) of tasks with failures in most attempts, worst first."""
    line: str = ""
    """Notice with the number of failures and the last error; empty without failures."""
    alarm: bool = False
    """The share is above the threshold."""

    @property
    def rate(self) -> float:
        return self.masked / self.tries if self.tries else 0.0


class InfraFailureRate:
    """Counts attempts. alarm_at: share of failures that raises an alarm; 0 = never."""

    def __init__(self, alarm_at: float) -> None:
        self._alarm_at = alarm_at
        self._tries: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._last_error = ""

    def failed(self, rollout: Rollout) -> None:
        """Count one attempt that failed of the infrastructure."""
        self._tries[rollout.task_id] += 1
        self._masked[rollout.task_id] += 1
        self._last_error = rollout.error

    def decided(self, rollout: Rollout) -> None:
        """Count a decided slot; a failed one was counted as an attempt."""
        if rollout.status is not Status.INFRA_FAILED:
            self._tries[rollout.task_id] += 1

    def close_step(self) -> _InfraFailures:
        """Return the counts since the last call and reset them."""
        tries, masked = self._tries, self._masked
        self._tries, self._masked = Counter(), Counter()
        worst = sorted(
            ((task, n, tries[task]) for task, n in masked.items() if tries[task] >= LEAST_OF_TASK),
            key=lambda row: (-row[1] / row[2], row[0]),
        )
        worst = [row for row in worst if 2 * row[1] > row[2]]
        counts = _InfraFailures(tries=tries.total(), masked=masked.total(), worst=worst)
        if not counts.masked:
            return counts
        much = counts.tries >= LEAST_TRIES and counts.rate >= self._alarm_at
        alarm = bool(self._alarm_at and (much or worst))
        line = f"{counts.masked} of {counts.tries} attempts failed of the infrastructure"
        if alarm:
            line += f" (collect.infra_failure_alarm = {self._alarm_at:g})"
        if worst:
            line += "; most of task " + ", ".join(f"{task} ({n} of {of})" for task, n, of in worst[:NAMED])
        log.warning("infra failures attempts=%d failed=%d tasks=%d", counts.tries, counts.masked, len(worst))
        return replace(counts, line=f"{line}; last error: {self._last_error}", alarm=alarm)
