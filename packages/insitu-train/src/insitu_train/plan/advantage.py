"""Credit of a rollout against its group.

An unscorable rollout (reward None) is not part of the mean or of G, and has no advantage; it is never a zero.
An estimator is a function of the G scorable rewards R, float64 [G] -> float64 [G], found by the registry:
    dr_grpo  R - mean                       (default; arXiv 2503.20783)
    grpo     (R - mean) / (std + 1e-8)      (arXiv 2402.03300; std of the population, as TRL's asynchronous
             trainer takes it; its GRPOTrainer and verl take the sample's, sqrt(G / (G - 1)) times as large)
    rloo     G / (G - 1) * (R - mean)       (= R minus the mean of the others)
    maxrl    (R - mean) / mean              (arXiv 2602.02710; rewards >= 0)
    zero     0                              (only the KL to a teacher is trained)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from insitu.errors import TrainError, user_code
from insitu.registry import find
from insitu.types import equal_rewards

Rewards = npt.NDArray[np.float64]
Estimator = Callable[[Rewards], Rewards]


def advantages(rewards: Sequence[float | None], name: str = "dr_grpo") -> tuple[float | None, ...]:
    """Return one advantage per reward, None where the reward is None.

    Equal rewards (`equal_rewards`) give exact zeros. Raises TrainError for a reward or an advantage that is
    not finite.
    """
    scorable = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if not np.isfinite(scorable).all():
        raise TrainError(f"a reward is not finite: {list(rewards)}")
    if equal_rewards(scorable.tolist()):
        return tuple(None if r is None else 0.0 for r in rewards)
    estimator: Estimator = find("advantages", name)
    with user_code(TrainError, f"advantage {name}"):
        credit = np.asarray(estimator(scorable.copy()), dtype=np.float64)
    if credit.shape != scorable.shape or not np.isfinite(credit).all():
        raise TrainError(
            f"advantage {name} returned {credit.tolist()} for rewards {scorable.tolist()},"
            f" expected {len(scorable)} finite numbers"
        )
    values = iter(credit.tolist())
    return tuple(None if r is None else next(values) for r in rewards)


def dr_grpo(rewards: Rewards) -> Rewards:
    return rewards - float(rewards.mean())


def grpo(rewards: Rewards) -> Rewards:
    return (rewards - float(rewards.mean())) * (1.0 / (float(rewards.std()) + 1e-8))


def rloo(rewards: Rewards) -> Rewards:
    return (rewards - float(rewards.mean())) * (len(rewards) / (len(rewards) - 1))


def maxrl(rewards: Rewards) -> Rewards:
    """Raise TrainError for a negative reward."""
    if (rewards < 0).any():
        raise TrainError(f"maxrl needs rewards >= 0, not {rewards.tolist()}")
    return (rewards - float(rewards.mean())) * (1.0 / float(rewards.mean()))


def zero(rewards: Rewards) -> Rewards:
    return np.zeros_like(rewards)


def overlong_penalty(tokens: int, between: Sequence[int]) -> float:
    """Return the reward penalty of a rollout of `tokens` sampled tokens (soft overlong punishment, DAPO).

    Linear from 0 to 1 between two numbers of tokens; 0 without them. arXiv 2503.14476.
    """
    if not between:
        return 0.0
    first, last = between
    return min(1.0, max(0.0, (tokens - first) / (last - first)))
