"""Alarms for a policy that gets worse: steps without an update, falling reward, vanishing entropy.

Values are compared with the best of the run, since a collapse is often slow. An alarm is raised once, and
again after a recovery. Low entropy alone is no alarm, since a policy that has learnt its tasks has it too:
the reward must have fallen as well. A fall must exceed the noise of steps: the best of many windows is above
the last one by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

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
            f" (train.collapse_alarm = {self._share:g}): resume an earlier checkpoint with a lower train.lr"
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
