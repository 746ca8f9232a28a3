"""A policy that gets worse: steps in a row without an update, a reward that falls, an entropy that is gone.

Each is compared with the best that the run has had, not with the steps before: a collapse is often slow. Told
once, and again after it was better in between. A low entropy alone is no alarm, since a policy that has
learnt its tasks has one too: the reward must have fallen as well. What steps scatter by is no fall: the best
of many windows lies above the last one by chance. Fed once per step, by loop.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

WINDOW = 4
"""Steps of which the mean is compared: a single one jumps about."""
IN_A_ROW = 3
"""Steps without an update that call for a person; told again at twice as many."""
LEAST_FALL = 0.1
"""Of a mean reward: less is noise where rewards are small."""
NOISE = 4.0
"""Standard deviations of one step, by which the best of some hundred windows and the last differ by chance
alone in few runs."""
ENTROPY_LEFT = 0.1
"""Share of the highest entropy below which little is left to explore."""


class CollapseAlarm:
    """Watches a run. `share`: of the best mean reward, below which it has fallen; 0 = say nothing at all.
    `before`: metrics of its committed steps."""

    def __init__(self, share: float, before: Iterable[Mapping[str, Any]] = ()) -> None:
        self._share = share
        self._rewards: list[float] = []
        self._entropies: list[float] = []
        self._skipped = 0
        self._told: set[str] = set()
        for step in before:
            self.look(step)

    def look(self, step: Mapping[str, Any]) -> list[str]:
        """The next step's `reward_mean` (None: nothing was graded), `entropy` and `skipped`; a line for each
        alarm."""
        self._skipped = self._skipped + 1 if step["skipped"] else 0
        if step.get("reward_mean") is not None:
            self._rewards.append(step["reward_mean"])
        if not step["skipped"] and step.get("entropy") is not None:
            self._entropies.append(step["entropy"])
        if not self._share:
            return []
        return [*self._still(step["skipped"]), *self._fallen(), *self._settled()]

    def _still(self, reason: str) -> list[str]:
        rounds, rest = divmod(self._skipped, IN_A_ROW)
        if rest or rounds.bit_count() != 1:
            return []
        return [f"{self._skipped} steps in a row changed no weight, the last since {reason}"]

    def _fallen(self) -> list[str]:
        best, now = best_and_now(self._rewards)
        if not self._once("reward", now < self._share * best and self._fell()):
            return []
        return [
            f"the mean reward of the last {WINDOW} steps is {now:.2f}, it has been {best:.2f}"
            f" (train.collapse_alarm = {self._share:g}): go back to a checkpoint, with a lower train.lr"
        ]

    def _settled(self) -> list[str]:
        best, now = best_and_now(self._entropies)
        if not self._once("entropy", now < ENTROPY_LEFT * best and self._fell()):
            return []
        return [
            f"the entropy of the last {WINDOW} steps is {now:.2g} nats, it has been {best:.2g}, and the"
            " reward has fallen: the policy explores little"
        ]

    def _fell(self) -> bool:
        """Whether the reward is below its best by more than the scatter of steps explains."""
        best, now = best_and_now(self._rewards)
        return best - now >= max(LEAST_FALL, NOISE * scatter(self._rewards))

    def _once(self, what: str, bad: bool) -> bool:
        new = bad and what not in self._told
        (self._told.add if bad else self._told.discard)(what)
        return new


def best_and_now(values: list[float]) -> tuple[float, float]:
    """The highest mean of WINDOW steps in a row before the last of them, and theirs; equal where there are
    too few."""
    if len(values) < 2 * WINDOW:
        return 0.0, 0.0
    means = [statistics.fmean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]
    return max(means[:-WINDOW]), means[-1]


def scatter(values: list[float]) -> float:
    """Estimate the standard deviation of one step from neighbours, which a trend leaves as it is."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(statistics.fmean((b - a) ** 2 for a, b in pairwise(values)) / 2)
