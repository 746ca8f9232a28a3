"""The change of solve rates between two evaluations of the same tasks: mean, 95 % interval and test.

The change is the mean over tasks of the change of each task's solve rate. With one attempt per task and side
these are Newcombe's interval for paired proportions and McNemar's exact test (docs/internals/collection.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from insitu.storage.pass_at_k import TaskCounts, mean_interval

_EXACT_TASKS, _EXACT_ADDITIONS = 1000, 1 << 25
"""Beyond these a normal distribution stands for the exact one of the test."""

Pairs = Sequence[tuple[TaskCounts, TaskCounts]]
"""The same tasks before and after, each with at least one graded attempt on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Mean change of the solve rates of at least one task."""

    value: float
    low: float
    high: float
    """Bounds of the 95 % interval."""
    tasks: int

    def rounded(self) -> dict[str, float]:
        """Return what summary.json and the viewer show."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def mean_change(pairs: Pairs) -> Change | None:
    """Return the mean change of the tasks' solve rates; None without tasks.

    The interval is Newcombe's square-and-add (Statistics in Medicine 17, 1998, method 10) of the intervals of
    both sides, which has a width where all tasks changed alike. It holds 0 where the sign-flip test does not
    reject at 5 %, so that the two never claim more than each other.
    """
    if not pairs:
        return None
    n, before, after = len(pairs), [a.rate for a, _ in pairs], [b.rate for _, b in pairs]
    rate_a, rate_b = sum(before) / n, sum(after) / n
    attempts_a, attempts_b = sum(a.graded for a, _ in pairs), sum(b.graded for _, b in pairs)
    low_a, high_a = mean_interval(before, attempts_a)
    low_b, high_b = mean_interval(after, attempts_b)
    correlation = _correlation(before, after, n * n / (attempts_a * attempts_b))

    def half(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    low = max(-1.0, rate_b - rate_a - half(rate_b - low_b, high_a - rate_a))
    high = min(1.0, rate_b - rate_a + half(high_b - rate_b, rate_a - low_a))
    if sign_flip_p(pairs) >= 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    return Change(value=rate_b - rate_a, low=low, high=high, tasks=n)


def _correlation(before: Sequence[float], after: Sequence[float], grain: float) -> float:
    """Return the correlation of the rates, a positive one with Newcombe's correction for continuity.

    grain: least difference between products of two rates; 1 with one attempt, where it is Newcombe's own.
    """
    # Sums of equal floats have a variance of rounding errors.
    if len({*before}) == 1 or len({*after}) == 1:
        return 0.0
    n = len(before)
    rate_a, rate_b = sum(before) / n, sum(after) / n
    covariance = sum(a * b for a, b in zip(before, after, strict=True)) / n - rate_a * rate_b
    variances = [
        sum((rate - mean) ** 2 for rate in rates) / n for rates, mean in ((before, rate_a), (after, rate_b))
    ]
    found = covariance / math.sqrt(variances[0] * variances[1])
    if found <= 0:
        return max(-1.0, found)
    return min(1.0, max(0.0, found - 0.5 * grain / (n * math.sqrt(variances[0] * variances[1]))))


def sign_flip_p(pairs: Pairs) -> float:
    """Return the two-sided p of the sign-flip test: that each task's change has its sign by chance.

    Exact up to a thousand tasks.
    """
    unit = math.lcm(*(side.graded for pair in pairs for side in pair))
    changes = [
        change
        for a, b in pairs
        if (change := b.resolved * (unit // b.graded) - a.resolved * (unit // a.graded))
    ]
    if not changes:
        return 1.0
    step = math.gcd(*changes)
    sizes = [abs(change) // step for change in changes]
    total, most = abs(sum(changes)) // step, sum(sizes)
    if len(sizes) > _EXACT_TASKS or len(sizes) * most > _EXACT_ADDITIONS:
        largest = max(sizes)  # quotients, since the integers may be larger than any float
        return math.erfc(max(0, total - 1) / largest / math.sqrt(2 * sum((s / largest) ** 2 for s in sizes)))
    # The chance of each sum of the changes that are positive.
    chances = np.zeros(most + 1)
    chances[0] = 1.0
    for size in sizes:
        chances[size:] += chances[:-size].copy()
        chances /= 2
    return min(1.0, 2 * float(chances[: (most - total) // 2 + 1].sum()))
