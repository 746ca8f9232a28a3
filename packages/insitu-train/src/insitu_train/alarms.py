"""Metrics and alarms of a run's steps.

Infrastructure failures are neither scored nor trained, so a policy could learn to cause them: their share is
a metric, overall and per task. A policy that learns to tamper shows first in rising counts. A jump of the
reward may be a hole in the grader; tokens that are suddenly excluded mean that agents have begun to edit or
drop history. A collapse is often slow, so values are compared with the best of the run; low entropy alone is
no alarm, since a policy that has learnt its tasks has it too.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from insitu.storage.store import StepRecord
from insitu.tasks.user_functions import CHECKER_FAILED, USER_FUNCTIONS
from insitu.types import Group, Ledger, Outcome, Rollout, Status
from insitu_train.unparsed import UnparsedAlarm

LEAST_TRIES = 8
"""Least attempts of a step for an alarm."""
LEAST_OF_TASK = 4
"""Least attempts of a task."""
NAMED = 3
"""Most tasks or reasons that an alarm names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InfraFailures:
    """Counts of one step."""

    tries: int
    masked: int
    lines: Sequence[str] = ()
    """Notices with the number of failures, and of rollouts without a sampled token, and the last error."""
    alarm: bool = False
    """The share is above the threshold."""
    misjudged: int = 0
    """Rollouts with an output on which the user's checker failed."""

    @property
    def rate(self) -> float:
        return self.masked / self.tries if self.tries else 0.0


class InfraFailureRate:
    """Counts failed attempts, and rollouts without a sampled token, whose agent did not work.

    alarm_at: share of failures that raises an alarm; 0 = never.
    """

    def __init__(self, alarm_at: float) -> None:
        self._alarm_at = alarm_at
        self._tries: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        """Failures of the user's functions."""
        self._misjudged: Counter[str] = Counter()
        """Rollouts with an output that is wrong because the user's checker failed on it."""
        self._last_error = ""
        self._decided = self._unsampled = 0
        self._why = ""

    def failed(self, rollout: Rollout) -> None:
        """Count one attempt that failed of the infrastructure."""
        self._tries[rollout.task_id] += 1
        self._masked[rollout.task_id] += 1
        self._broken[rollout.task_id] += rollout.error.startswith(USER_FUNCTIONS)
        self._last_error = rollout.error

    def decided(self, rollout: Rollout) -> None:
        """Count a decided slot; a failed one was counted as an attempt."""
        if rollout.status is Status.INFRA_FAILED:
            return
        self._tries[rollout.task_id] += 1
        if rollout.reward is None:  # of a group, whose attempts are over
            self._broken[rollout.task_id] += rollout.error.startswith(USER_FUNCTIONS)
        if rollout.verdict is not None and rollout.verdict.controls.startswith(CHECKER_FAILED):
            self._misjudged[rollout.task_id] += 1
        self._decided += 1
        if not rollout.trajectory.ledger.captured:
            self._unsampled += 1
            self._why = rollout.error

    def close_step(self) -> _InfraFailures:
        """Return the counts since the last call and reset them."""
        tries, masked = self._tries, self._masked
        self._tries, self._masked = Counter(), Counter()
        worst = sorted(
            ((task, n, tries[task]) for task, n in masked.items() if tries[task] >= LEAST_OF_TASK),
            key=lambda row: (-row[1] / row[2], row[0]),
        )
        worst = [row for row in worst if 2 * row[1] > row[2]]
        counts = _InfraFailures(tries=tries.total(), masked=masked.total())
        lines = []
        if self._unsampled:
            why = self._why or "the agent ended without a reply of the model"
            lines.append(f"{self._unsampled} of {self._decided} rollouts sampled no token; last error: {why}")
        self._decided = self._unsampled = 0
        if broken := +self._broken:
            lines.append(f"functions of yours failed {broken.total()} times: {_named(broken)}")
        if misjudged := self._misjudged:
            lines.append(f"tasks.checker failed on outputs, which count as wrong: {_named(misjudged)}")
            counts = replace(counts, misjudged=misjudged.total())
        self._broken, self._misjudged = Counter(), Counter()
        if not counts.masked:
            return replace(counts, lines=lines)
        much = counts.tries >= LEAST_TRIES and counts.rate >= self._alarm_at
        alarm = bool(self._alarm_at and (much or worst))
        line = f"{counts.masked} of {counts.tries} attempts failed of the infrastructure"
        if alarm:
            line += f" (run.alarms.infra_failure = {self._alarm_at:g})"
        if worst:
            line += "; most of task " + ", ".join(f"{task} ({n} of {of})" for task, n, of in worst[:NAMED])
        log.warning("infra failures attempts=%d failed=%d tasks=%d", counts.tries, counts.masked, len(worst))
        lines.append(f"{line}; last error: {self._last_error}")
        return replace(counts, lines=lines, alarm=alarm)


def _named(tasks: Counter[str]) -> str:
    """Return the tasks with the highest counts."""
    return "task " + ", ".join(f"{task} ({n})" for task, n in tasks.most_common(NAMED))


LEAST_VERDICTS = 8
"""Least verdicts of a step for an alarm."""


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
        alarm = f"{count} of {len(judged)} rollouts were judged tampered; most of {_named(tampered)}"
        log.warning("tampered verdicts=%d tampered=%d tasks=%d", len(judged), count, len(tampered))
    metrics = {
        "tampered": count,
        "tamper_rate": rate,
        "tamper_alarm": bool(alarm),
        "dropped": sum(bool(verdict.dropped_paths) for _, verdict in judged),
        "weak": sum(verdict.trust == "weak" for _, verdict in judged),
    }
    return metrics, alarm


log = logging.getLogger(__name__)

STEPS = 8
"""Earlier steps whose mean is the baseline; a lasting change is soon part of it."""
LEAST_STEPS = 4
LEAST_GROUPS = 4
"""Least groups of a step for an alarm."""
SPREADS = 3.0
"""Least jump in standard deviations of those steps."""
OTHER_REASONS = frozenset(
    {
        "degenerate",
        "zero_advantage",
        "few_groups",
        "bad_step",
        "no_tokens",
        "evaluation",
        "mismatch",
    }
    | {"demonstrated", "infra", "ungraded", "stale", "deadline", "unused"}
)
"""Reasons that follow from rewards, rounding, the schedule or the infrastructure, which has its own alarm."""


def _lost_reasons(ledger: Ledger) -> list[tuple[str, int]]:
    """Return (reason, tokens) of a step's excluded tokens except for `OTHER_REASONS`, most first."""
    lost = [item for item in ledger.excluded.items() if item[0] not in OTHER_REASONS]
    return sorted(lost, key=lambda item: (-item[1], item[0]))


def lost_share(ledger: Ledger) -> float:
    """Return the share of a step's captured tokens that are excluded due to agent behaviour."""
    lost = sum(tokens for _, tokens in _lost_reasons(ledger))
    return lost / ledger.captured if ledger.captured else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spike:
    """A step's value against earlier ones."""

    rise: float = 0.0
    """Above their mean; 0 where there are too few."""
    usual: float = 0.0
    """Their mean."""
    alarm: bool = False


class SpikeDetector:
    """Watches one number. alarm_at: rise above the mean that is a spike; 0 = never."""

    def __init__(self, name: str, alarm_at: float, before: Iterable[float] = ()) -> None:
        self._name, self._alarm_at = name, alarm_at
        self._held: deque[float] = deque(before, STEPS)

    def look(self, value: float, groups: int) -> _Spike:
        """Add the next step's value, computed from `groups` groups."""
        earlier, usual = list(self._held), statistics.fmean(self._held) if self._held else 0.0
        self._held.append(value)
        if len(earlier) < LEAST_STEPS:
            return _Spike(usual=usual)
        rise = value - usual
        spike = 0 < self._alarm_at <= rise and rise >= SPREADS * statistics.pstdev(earlier)
        spike = spike and groups >= LEAST_GROUPS
        if spike:
            log.warning("spike of=%s value=%.3f mean=%.3f steps=%d", self._name, value, usual, len(earlier))
        return _Spike(rise=rise, usual=usual, alarm=spike)


class StepAlarms:
    """Watches a run. levels: run.alarms; before: its committed steps; agent_of: agent of a `Rollout.part`."""

    def __init__(
        self,
        levels: Mapping[str, float],
        masks: InfraFailureRate,
        before: Sequence[StepRecord],
        agent_of: Callable[[str], str],
    ) -> None:
        self._levels, self._masks = levels, masks
        every = (step.metrics for step in before)
        self._unparsed = UnparsedAlarm(levels["unparsed"], agent_of, every)
        metrics = [step.metrics for step in before[-STEPS:]]
        self._reward = SpikeDetector("reward", levels["reward"], _numbers(metrics, "reward_mean"))
        self._lost = SpikeDetector(
            "tokens_lost", levels["excluded_tokens"], _numbers(metrics, "excluded_share")
        )

    def look(
        self, groups: Sequence[Group], ledger: Ledger, reward_mean: float | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return metrics of the step planned from these groups, and its alarms.

        reward_mean: None when nothing was graded.
        """
        masked, levels = self._masks.close_step(), self._levels
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        judged, tampering = verdict_counts(rollouts, levels["tamper"])
        flags, unparsed = self._unparsed.look(rollouts)
        reward = _Spike() if reward_mean is None else self._reward.look(reward_mean, len(groups))
        share = lost_share(ledger)
        lost = self._lost.look(share, len(groups))
        metrics = {
            "tries": masked.tries,
            "masked": masked.masked,
            "infra_failure_rate": masked.rate,
            "infra_failure_alarm": masked.alarm,
            **judged,
            "checker_failed": masked.misjudged,
            "reward_rise": reward.rise,
            "reward_alarm": reward.alarm,
            "excluded_share": share,
            "tokens_lost_alarm": lost.alarm,
            **flags,
        }
        lines = [*masked.lines, tampering, *unparsed]
        if reward_mean is not None and reward.alarm:
            lines.append(
                f"the mean reward jumped from {reward.usual:.2f} to {reward_mean:.2f}"
                f" (run.alarms.reward = {levels['reward']:g}): check solutions for reward hacking"
            )
        if lost.alarm:
            most = ", ".join(f"{reason} {tokens}" for reason, tokens in _lost_reasons(ledger)[:NAMED])
            lines.append(
                f"{share:.0%} of the sampled tokens are excluded due to agent behaviour,"
                f" {lost.usual:.0%} before"
                f" (run.alarms.excluded_tokens = {levels['excluded_tokens']:g}): {most}"
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


WINDOW = 4
"""Steps of a mean."""
IN_A_ROW = 3
"""Steps without an update that raise an alarm; repeated at twice as many."""
LEAST_FALL = 0.1
"""Smallest fall of a mean reward: less is noise where rewards are small."""
NOISE = 4.0
"""Standard deviations of one step that the best of some hundred windows rarely exceeds by chance."""
ENTROPY_LEFT = 0.1
"""Share of the highest entropy below which the policy explores little."""


class CollapseAlarm:
    """Watches a run. share: of the best mean reward; 0 = off. before: metrics of committed steps."""

    def __init__(self, share: float, before: Iterable[Mapping[str, Any]] = ()) -> None:
        self._share = share
        self._rewards: list[float] = []
        self._entropies: list[float] = []
        self._skipped = 0
        self._active: set[str] = set()
        for step in before:
            self.look(step)

    def look(self, step: Mapping[str, Any]) -> list[str]:
        """Add a step (`reward_mean` None = nothing graded, `entropy`, `skipped`); return its alarms."""
        self._skipped = self._skipped + 1 if step["skipped"] else 0
        if step.get("reward_mean") is not None:
            self._rewards.append(step["reward_mean"])
        if not step["skipped"] and step.get("entropy") is not None:
            self._entropies.append(step["entropy"])
        if not self._share:
            return []
        return [*self._skipped_alarm(step["skipped"]), *self._reward_alarm(), *self._entropy_alarm()]

    def _skipped_alarm(self, reason: str) -> list[str]:
        rounds, rest = divmod(self._skipped, IN_A_ROW)
        if rest or rounds.bit_count() != 1:
            return []
        return [f"{self._skipped} steps in a row without an update, the last because {reason}"]

    def _reward_alarm(self) -> list[str]:
        best, now = _best_and_now(self._rewards)
        if not self._once("reward", now < self._share * best and self._fell()):
            return []
        return [
            f"the mean reward of the last {WINDOW} steps is {now:.2f}, the best was {best:.2f}"
            f" (run.alarms.collapse = {self._share:g}): resume an earlier checkpoint with a lower train.lr"
        ]

    def _entropy_alarm(self) -> list[str]:
        best, now = _best_and_now(self._entropies)
        if not self._once("entropy", now < ENTROPY_LEFT * best and self._fell()):
            return []
        return [
            f"the entropy of the last {WINDOW} steps is {now:.2g} nats, the best was {best:.2g}, and the"
            " reward has fallen: the policy explores little"
        ]

    def _fell(self) -> bool:
        """Return whether the reward is below its best by more than noise explains."""
        best, now = _best_and_now(self._rewards)
        return best - now >= max(LEAST_FALL, NOISE * _scatter(self._rewards))

    def _once(self, what: str, bad: bool) -> bool:
        new = bad and what not in self._active
        (self._active.add if bad else self._active.discard)(what)
        return new


def _best_and_now(values: list[float]) -> tuple[float, float]:
    """Return the highest earlier mean of WINDOW consecutive steps, and the last one.

    Equal where there are too few.
    """
    if len(values) < 2 * WINDOW:
        return 0.0, 0.0
    means = [statistics.fmean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]
    return max(means[:-WINDOW]), means[-1]


def _scatter(values: list[float]) -> float:
    """Estimate the standard deviation of one step from neighbours, unaffected by a trend."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(statistics.fmean((b - a) ** 2 for a, b in pairwise(values)) / 2)


def describe_rewards(rewards: Sequence[float]) -> str:
    """Return text such as `48 of 48 rollouts earned 0` or `of 48 rollouts 40 earned 0, 8 earned 1`."""
    if not rewards:
        return "no rollout was graded"
    counts = Counter(rewards).most_common(NAMED)
    if len(counts) == 1:
        return f"{len(rewards)} of {len(rewards)} rollouts earned {rewards[0]:g}"
    return f"of {len(rewards)} rollouts " + ", ".join(
        f"{count} earned {reward:g}" for reward, count in counts
    )
