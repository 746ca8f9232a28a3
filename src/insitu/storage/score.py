"""Statistics and text about the rewards of graded rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from insitu.storage.pass_at_k import wilson_interval

NAMED_REWARDS = 3
"""Maximum number of different rewards listed in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Rewards of graded rollouts, without infrastructure failures."""

    solved: int
    """Rollouts with reward 1 or more."""
    total: int
    reward_sum: float
    tasks: int = field(default=0, compare=False)
    """Tasks that the rollouts are of; 0 = as many as rollouts."""

    @classmethod
    def of(cls, rewards: Collection[float], tasks: int = 0) -> Score:
        solved = sum(r >= 1.0 for r in rewards)
        return cls(solved=solved, total=len(rewards), reward_sum=sum(rewards), tasks=tasks)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the solve rate; (0, 1) when nothing was graded.

        Several rollouts of a task count as one: they are not independent.
        """
        return wilson_interval(self.rate, self.tasks or self.total)

    @property
    def rate(self) -> float:
        """Solve rate; 0 when nothing was graded."""
        return self.solved / self.total if self.total else 0.0

    @property
    def reward_mean(self) -> float:
        """Mean reward; 0 when nothing was graded."""
        return self.reward_sum / self.total if self.total else 0.0

    @property
    def partial(self) -> bool:
        """Whether some rewards are not 0 or 1, so that the mean reward differs from the solve rate."""
        return self.reward_sum != self.solved


def describe_rewards(rewards: Sequence[float]) -> str:
    """Return text such as `48 of 48 rollouts earned 0` or `of 48 rollouts 40 earned 0, 8 earned 1`."""
    if not rewards:
        return "no rollout was graded"
    counts = Counter(rewards).most_common(NAMED_REWARDS)
    if len(counts) == 1:
        return f"{len(rewards)} of {len(rewards)} rollouts earned {rewards[0]:g}"
    return f"of {len(rewards)} rollouts " + ", ".join(
        f"{count} earned {reward:g}" for reward, count in counts
    )
