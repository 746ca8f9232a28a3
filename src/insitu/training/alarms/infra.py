"""How many tries are masked: failed of the infrastructure, so that they are neither scored nor trained on.

What an agent breaks itself is scored. Should it find a way to be masked instead, a policy would learn it: a
masked failure costs nothing. So the share of masked tries is a metric of every step, over all tasks and per
task, a step with failures has a line that names the last, and a high share is an alarm. Fed by the sink, read
by the loop once per step (= policy version).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from insitu.types import Rollout, Status

log = logging.getLogger(__name__)

LEAST_TRIES = 8
"""Of a step: fewer say nothing about a share."""
LEAST_OF_TASK = 4
NAMED = 3
"""Tasks that one alarm names at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfraFailures:
    """The account of one step."""

    tries: int
    masked: int
    worst: Sequence[tuple[str, int, int]]
    """(task, masked, tries) of tasks that are masked in most of their tries, worst first."""
    line: str = ""
    """For a person: how many tries failed, and the error of the last; empty when none did."""
    alarm: bool = False
    """The share is over the threshold."""

    @property
    def rate(self) -> float:
        return self.masked / self.tries if self.tries else 0.0


class InfraFailureRate:
    """Counts tries. `alarm_at`: share of masked ones from which a step raises an alarm; 0 = never."""

    def __init__(self, alarm_at: float) -> None:
        self._alarm_at = alarm_at
        self._tries: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._last_error = ""

    def failed(self, rollout: Rollout) -> None:
        """One try failed of the infrastructure, the last one of its slot or not."""
        self._tries[rollout.task_id] += 1
        self._masked[rollout.task_id] += 1
        self._last_error = rollout.error

    def decided(self, rollout: Rollout) -> None:
        """A slot was decided. A masked one was counted as a failed try."""
        if rollout.status is not Status.INFRA_FAILED:
            self._tries[rollout.task_id] += 1

    def close_step(self) -> InfraFailures:
        """The account since the last call; counting begins anew."""
        tries, masked = self._tries, self._masked
        self._tries, self._masked = Counter(), Counter()
        worst = sorted(
            ((task, n, tries[task]) for task, n in masked.items() if tries[task] >= LEAST_OF_TASK),
            key=lambda row: (-row[1] / row[2], row[0]),
        )
        worst = [row for row in worst if 2 * row[1] > row[2]]
        account = InfraFailures(tries=tries.total(), masked=masked.total(), worst=worst)
        if not account.masked:
            return account
        much = account.tries >= LEAST_TRIES and account.rate >= self._alarm_at
        alarm = bool(self._alarm_at and (much or worst))
        line = f"{account.masked} of {account.tries} tries were masked as failures of the infrastructure"
        if alarm:
            line += f" (collect.infra_failure_alarm = {self._alarm_at:g})"
        if worst:
            line += "; most of task " + ", ".join(f"{task} ({n} of {of})" for task, n, of in worst[:NAMED])
        log.warning("masked tries=%d masked=%d tasks=%d", account.tries, account.masked, len(worst))
        return replace(account, line=f"{line}; the last: {self._last_error}", alarm=alarm)
