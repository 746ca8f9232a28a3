"""Metrics of a step's verdicts besides the reward.

A policy that learns to tamper shows first in rising counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from insitu.types import Outcome, Rollout

log = logging.getLogger(__name__)

LEAST_VERDICTS = 8
"""Least verdicts of a step for an alarm."""
NAMED = 3
"""Most tasks that an alarm names."""


def verdict_counts(rollouts: Iterable[Rollout], alarm_at: float) -> tuple[dict[str, Any], str]:
    """Return metrics of a step's graded rollouts, and an alarm or "".

    alarm_at: share of tampered ones that raises it; 0 = never.
    """
    judged = [
        (rollout.task_id, rollout.verdict)
        for rollout in rollouts
        if rollout.verdict is not None and rollout.verdict.outcome is not Outcome.INFRA
    ]
    tampered = Counter(task for task, verdict in judged if verdict.outcome is Outcome.TAMPERED)
    count = tampered.total()
    rate = count / len(judged) if judged else 0.0
    alarm = ""
    if alarm_at and len(judged) >= LEAST_VERDICTS and rate >= alarm_at:
        worst = ", ".join(f"{task} ({n})" for task, n in tampered.most_common(NAMED))
        alarm = f"{count} of {len(judged)} rollouts were judged tampered; most of task {worst}"
        log.warning("tampered verdicts=%d tampered=%d tasks=%d", len(judged), count, len(tampered))
    metrics = {
        "tampered": count,
        "tamper_rate": rate,
        "tamper_alarm": bool(alarm),
        "dropped": sum(bool(verdict.dropped_paths) for _, verdict in judged),
        "weak": sum(verdict.trust == "weak" for _, verdict in judged),
    }
    return metrics, alarm
