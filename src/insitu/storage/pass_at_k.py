"""Unbiased pass@k and pass^k over tasks, with 95 % intervals.

For a task with n graded attempts, c of them resolved, pass@k = 1 - C(n-c, k) / C(n, k): one of k is resolved;
pass^k = C(c, k) / C(n, k): all k are. The result is the mean over tasks with at least k graded attempts.
Intervals are over tasks, since attempts at one task are not independent (docs/internals/collection.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_Z95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """Graded and resolved attempts at one task."""

    graded: int
    resolved: int
    """Attempts with reward 1 or more."""
    reward_sum: float = 0.0

    @classmethod
    def of(cls, rewards: Collection[float]) -> TaskCounts:
        resolved = sum(reward >= 1.0 for reward in rewards)
        return cls(graded=len(rewards), resolved=resolved, reward_sum=sum(rewards))

    @property
    def rate(self) -> float:
        """Share of the graded attempts that are resolved; there must be one."""
        return self.resolved / self.graded


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """One pass@k or pass^k estimate."""

    k: int
    value: float
    low: float
    high: float
    """Bounds of the 95 % interval; [0, 1] if there is no task."""
    tasks: int
    """Tasks with at least k graded attempts; the others are ignored."""


def pass_at_k(graded: int, resolved: int, k: int) -> float:
    """Return pass@k of one task.

    Raises ValueError when there are fewer than k attempts.
    """
    if not 0 <= resolved <= graded or not 1 <= k <= graded:
        raise ValueError(f"no pass@{k} of {resolved} resolved among {graded}")
    return (math.comb(graded, k) - math.comb(graded - resolved, k)) / math.comb(graded, k)


def pass_all_k(graded: int, resolved: int, k: int) -> float:
    """Return pass^k of one task: the chance that k attempts at it are all resolved.

    Raises ValueError when there are fewer than k attempts.
    """
    if not 0 <= resolved <= graded or not 1 <= k <= graded:
        raise ValueError(f"no pass^{k} of {resolved} resolved among {graded}")
    return math.comb(resolved, k) / math.comb(graded, k)


def wilson_interval(rate: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a rate over `n` samples; (0, 1) when n is 0."""
    if n == 0:
        return 0.0, 1.0
    centre = (rate + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z95**2 / (4 * n * n))
    # Rounding must not exclude a rate of exactly 0 or 1 from its own interval.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def mean_interval(rates: Sequence[float], attempts: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean rate of tasks with so many attempts; (0, 1) without tasks.

    Wilson's, over as many independent outcomes as vary like the rates: from the number of tasks, if every
    task is solved always or never, to that of the attempts. The variance counts one task more of each kind,
    so rates that happen to be equal are not certain.
    """
    n = len(rates)
    if n == 0:
        return 0.0, 1.0
    mean = (sum(rates) + 1) / (n + 2)
    variance = (sum(rate * rate for rate in rates) + 1) / (n + 2) - mean * mean
    outcomes = min(max(n * mean * (1 - mean) / variance, n), attempts)
    return wilson_interval(sum(rates) / n, outcomes)


def estimate(tasks: Sequence[TaskCounts], k: int, *, all_of: bool = False) -> PassAtK:
    """Return pass@k of a set of tasks; `all_of`: pass^k."""
    used = [task for task in tasks if task.graded >= k]
    of_task = pass_all_k if all_of else pass_at_k
    values = [of_task(task.graded, task.resolved, k) for task in used]
    low, high = mean_interval(values, sum(task.graded for task in used))
    value = sum(values) / len(values) if values else 0.0
    return PassAtK(k=k, value=value, low=low, high=high, tasks=len(used))


def reported_ks(attempts: int) -> list[int]:
    """Return the reported values of k: powers of two up to `attempts`, and `attempts`."""
    powers = [1 << bit for bit in range(attempts.bit_length()) if 1 << bit <= attempts]
    return sorted({*powers, attempts})


def covered(tasks: int, of: int) -> str:
    """Return how many tasks have enough graded attempts for an estimate; empty if all have."""
    return f", {tasks} of {of} tasks" if tasks < of else ""


def title(name: str) -> str:
    """Return the name of a level for people: pass@4 for pass_at_4, pass^4 for pass_all_4."""
    return name.replace("pass_at_", "pass@").replace("pass_all_", "pass^").replace("solve_rate", "solved")
