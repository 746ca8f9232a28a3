"""Statistics of the rewards of graded rollouts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from insitu.storage.pass_at_k import TaskCounts, estimate, wilson_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of graded rollouts, without infrastructure failures."""

    solved: int
    """Rollouts with reward 1 or more."""
    total: int
    rate: float = 0.0
    """Solve rate; 0 when nothing was graded."""
    reward_mean: float = 0.0
    low: float = 0.0
    high: float = 1.0
    """Bounds of the 95 % interval of the solve rate."""

    @classmethod
    def of(cls, rewards: Collection[float]) -> Score:
        """Return the score of rollouts of which each counts alone."""
        solved, total = sum(reward >= 1.0 for reward in rewards), len(rewards)
        if not total:
            return cls(solved=0, total=0)
        rate = solved / total
        low, high = wilson_interval(rate, total)
        mean = sum(rewards) / total
        return cls(solved=solved, total=total, rate=rate, reward_mean=mean, low=low, high=high)

    @classmethod
    def of_tasks(cls, tasks: Collection[TaskCounts]) -> Score:
        """Return the score of an evaluation: means over tasks of each one's mean over its graded rollouts."""
        graded = [task for task in tasks if task.graded]
        if not graded:
            return cls(solved=0, total=0)
        level = estimate(graded, 1)
        return cls(
            solved=sum(task.resolved for task in graded),
            total=sum(task.graded for task in graded),
            rate=level.value,
            reward_mean=sum(task.reward_sum / task.graded for task in graded) / len(graded),
            low=level.low,
            high=level.high,
        )

    @property
    def partial(self) -> bool:
        """Whether some rewards are not 0 or 1, so that the mean reward differs from the solve rate."""
        return self.reward_mean != self.rate
