"""What the verdicts of a step say about the agents and the grader, beside the reward.

A policy that learns to tamper is found out by rising counts before it is found out by anything else. The loop
reads this once per step; a high share is said aloud.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from insitu.types import Outcome, Rollout

log = logging.getLogger(__name__)

LEAST_VERDICTS = 8
"""Of a step: fewer say nothing about a share."""
NAMED = 3
"""Tasks that one alarm names at most."""


def verdict_counts(rollouts: Iterable[Rollout], alarm_at: float) -> tuple[dict[str, Any], str]:
    """Metrics of a step's graded rollouts, and one line when the share of tampered ones is at least
    `alarm_at` (0 = never), else an empty text."""
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
