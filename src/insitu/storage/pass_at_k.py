"""Unbiased pass@k and pass^k over tasks, with 95 % intervals.

For a task with n graded attempts, c of them resolved, pass@k = 1 - C(n-c, k) / C(n, k): one of k is resolved;
pass^k = C(c, k) / C(n, k): all k are. The result is the mean over tasks with at least k graded attempts.
Intervals: Wilson if every task counts as one binary outcome, else percentile bootstrap over tasks, since
attempts at one task are not independent. Changes between two rates of the same tasks likewise (Newcombe).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000
"""Number of bootstrap resamples."""
CHUNK = 1 << 22
"""Maximum number of drawn task indices in memory."""
_Z95 = 1.959964

Method = Literal["wilson", "bootstrap", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """Graded and resolved attempts at one task."""

    graded: int
    resolved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """One pass@k or pass^k estimate."""

    k: int
    value: float
    low: float
    high: float
    """Bounds of the 95 % interval."""
    tasks: int
    """Tasks with at least k graded attempts; the others are ignored."""
    method: Method
    """`none`: there is no such task, and the interval is [0, 1]."""


def pass_at_k(graded: int, resolved: int, k: int) -> float:
    """Return pass@k of one task.

    Raises ValueError when there are fewer than k attempts.
    """
    if not 0 <= resolved <= graded or not 1 <= k <= graded:
        raise ValueError(f"no pass@{k} of {resolved} resolved among {graded}")
    return 1.0 - math.comb(graded - resolved, k) / math.comb(graded, k)


def pass_all_k(graded: int, resolved: int, k: int) -> float:
    """Return pass^k of one task: the chance that k attempts at it are all resolved.

    Raises ValueError when there are fewer than k attempts.
    """
    if not 0 <= resolved <= graded or not 1 <= k <= graded:
        raise ValueError(f"no pass^{k} of {resolved} resolved among {graded}")
    return math.comb(resolved, k) / math.comb(graded, k)


def wilson_interval(rate: float, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a rate over `n` samples; (0, 1) when n is 0."""
    if n == 0:
        return 0.0, 1.0
    centre = (rate + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z95**2 / (4 * n * n))
    # Rounding must not exclude a rate of exactly 0 or 1 from its own interval.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean over tasks; deterministic per seed."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means: list[float] = []
    rows_per_chunk = max(1, CHUNK // len(data))
    while len(means) < RESAMPLES:
        rows = min(rows_per_chunk, RESAMPLES - len(means))
        means += data[rng.integers(0, len(data), size=(rows, len(data)))].mean(axis=1).tolist()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def paired_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean change of rates of the same tasks, of which there is at least one.

    Newcombe's square-and-add interval for paired proportions (Statistics in Medicine 17, 1998, method 10): it
    has a width where all tasks changed alike. A rate between 0 and 1 counts as a part of an outcome.
    """
    n = len(before)
    both = sum(a * b for a, b in zip(before, after, strict=True))
    rate_a, rate_b = sum(before) / n, sum(after) / n
    only_a, only_b = n * rate_a - both, n * rate_b - both
    excess = both * (n - both - only_a - only_b) - only_a * only_b
    scale = n * n * math.sqrt(rate_a * (1 - rate_a) * rate_b * (1 - rate_b))
    correlation = (max(0.0, excess - n / 2) if excess > 0 else excess) / scale if scale else 0.0
    (low_a, high_a), (low_b, high_b) = wilson_interval(rate_a, n), wilson_interval(rate_b, n)

    def half(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    change = rate_b - rate_a
    return (
        max(-1.0, change - half(rate_b - low_b, high_a - rate_a)),
        min(1.0, change + half(high_b - rate_b, rate_a - low_a)),
    )


def mean_change(before: Sequence[float], after: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Return the mean change of the rates of the same tasks, at least one, and its 95 % interval."""
    changes = [b - a for a, b in zip(before, after, strict=True)]
    outcomes = all(rate in (0.0, 1.0) for rate in (*before, *after))
    if outcomes or min(changes) == max(changes):
        low, high = paired_interval(before, after)
    else:
        low, high = bootstrap(changes, seed)
    return sum(changes) / len(changes), low, high


def estimate(tasks: Sequence[TaskCounts], k: int, *, seed: int = 0, all_of: bool = False) -> PassAtK:
    """Return pass@k of a set of tasks; `all_of`: pass^k."""
    used = [task for task in tasks if task.graded >= k]
    if not used:
        return PassAtK(k=k, value=0.0, low=0.0, high=1.0, tasks=0, method="none")
    of_task = pass_all_k if all_of else pass_at_k
    values = [of_task(task.graded, task.resolved, k) for task in used]
    mean = sum(values) / len(values)
    # If all values are equal, every resample is the same and the bootstrap interval would have zero width.
    constant = min(values) == max(values)
    if constant or all(task.graded == k for task in used):
        low, high = wilson_interval(mean, len(values))
        return PassAtK(k=k, value=mean, low=low, high=high, tasks=len(used), method="wilson")
    low, high = bootstrap(values, seed)
    return PassAtK(k=k, value=mean, low=low, high=high, tasks=len(used), method="bootstrap")


def reported_ks(attempts: int) -> list[int]:
    """Return the reported values of k: powers of two up to `attempts`, and `attempts`."""
    powers = [1 << bit for bit in range(attempts.bit_length()) if 1 << bit <= attempts]
    return sorted({*powers, attempts})


def title(name: str) -> str:
    """Return the name of a level for people: pass@4 for pass_at_4, pass^4 for pass_all_4."""
    return name.replace("pass_at_", "pass@").replace("pass_all_", "pass^").replace("solve_rate", "solved")
