"""Metrics and alarms of a step about infrastructure failures, tampering and spikes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insitu.config.training import CollectTable
from insitu.storage.score import describe_rewards
from insitu.storage.store import StepRecord
from insitu.training.alarms.infra import InfraFailureRate
from insitu.training.alarms.spikes import NAMED, STEPS, Spike, SpikeDetector, lost_reasons, lost_share
from insitu.training.alarms.tampering import verdict_counts
from insitu.types import Group, Ledger

UNKNOWN = Spike(rise=0.0, usual=0.0, alarm=False)


class StepAlarms:
    """Watches a run. before: its committed steps."""

    def __init__(self, limits: CollectTable, masks: InfraFailureRate, before: Sequence[StepRecord]) -> None:
        self._limits, self._masks = limits, masks
        metrics = [step.metrics for step in before[-STEPS:]]
        self._reward = SpikeDetector("reward", limits.reward_alarm, _numbers(metrics, "reward_mean"))
        self._lost = SpikeDetector(
            "tokens_lost", limits.excluded_tokens_alarm, _numbers(metrics, "excluded_share")
        )

    def look(
        self, groups: Sequence[Group], ledger: Ledger, reward_mean: float | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return metrics of the step planned from these groups, and its alarms.

        reward_mean: None when nothing was graded.
        """
        masked, limits = self._masks.close_step(), self._limits
        judged, tampering = verdict_counts((r for g in groups for r in g.rollouts), limits.tamper_alarm)
        reward = UNKNOWN if reward_mean is None else self._reward.look(reward_mean, len(groups))
        share = lost_share(ledger)
        lost = self._lost.look(share, len(groups))
        metrics = {
            "tries": masked.tries,
            "masked": masked.masked,
            "infra_failure_rate": masked.rate,
            "infra_failure_alarm": masked.alarm,
            **judged,
            "reward_rise": reward.rise,
            "reward_alarm": reward.alarm,
            "excluded_share": share,
            "tokens_lost_alarm": lost.alarm,
        }
        lines = [masked.line, tampering]
        if reward_mean is not None and reward.alarm:
            lines.append(
                f"the mean reward jumped from {reward.usual:.2f} to {reward_mean:.2f}"
                f" (collect.reward_alarm = {limits.reward_alarm:g}): check solutions for reward hacking"
            )
        if lost.alarm:
            most = ", ".join(f"{reason} {tokens}" for reason, tokens in lost_reasons(ledger)[:NAMED])
            lines.append(
                f"{share:.0%} of the sampled tokens are excluded due to agent behaviour,"
                f" {lost.usual:.0%} before"
                f" (collect.excluded_tokens_alarm = {limits.excluded_tokens_alarm:g}): {most}"
            )
        return metrics, [line for line in lines if line]


def _numbers(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [metrics[name] for metrics in steps if metrics[name] is not None]


def why_untrained(groups: Sequence[Group], skipped: str) -> str:
    """Return the notice of a step without an update, or "". skipped: the plan's reason."""
    if not skipped:
        return ""
    if any(not group.degenerate for group in groups):
        return f"no update: {skipped}"
    earned = describe_rewards([reward for group in groups for reward in group.rewards])
    return f"no update: all groups have equal rewards, {earned}"
