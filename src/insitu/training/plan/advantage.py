"""Credit of a rollout against its group. Pure.

An unscorable rollout (reward None: the infrastructure failed) is out of the mean and out of G, and has no
advantage; it is never a zero. Formulas over the G scorable rewards R (docs: reference, training, 1.1):
    dr_grpo  R - mean                       (default; arXiv 2503.20783)
    grpo     (R - mean) / (std + 1e-8)      (arXiv 2402.03300; std of the population, as TRL's asynchronous
             trainer takes it; its GRPOTrainer and verl take the sample's, sqrt(G / (G - 1)) times as large)
    rloo     G / (G - 1) * (R - mean)       (= R minus the mean of the others)
    maxrl    (R - mean) / mean              (arXiv 2602.02710; rewards >= 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from insitu.errors import TrainError
from insitu.types import equal_rewards

AdvantageKind = Literal["dr_grpo", "grpo", "rloo", "maxrl"]


def advantages(rewards: Sequence[float | None], kind: AdvantageKind = "dr_grpo") -> tuple[float | None, ...]:
    """One advantage per reward, None where the reward is None. Rewards that are all equal (`equal_rewards`)
    give exact zeros.

    Raises TrainError for a reward that is not finite, and for maxrl with a negative one.
    """
    scorable = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if not np.isfinite(scorable).all():
        raise TrainError(f"a reward is not finite: {list(rewards)}")
    if kind == "maxrl" and (scorable < 0).any():
        raise TrainError(f"maxrl needs rewards >= 0, not {list(rewards)}")
    if equal_rewards(scorable.tolist()):
        return tuple(None if r is None else 0.0 for r in rewards)
    mean = float(scorable.mean())
    count = len(scorable)
    scale = {
        "dr_grpo": 1.0,
        "grpo": 1.0 / (float(scorable.std()) + 1e-8),
        "rloo": count / (count - 1),
        "maxrl": 1.0 / mean if mean else 0.0,
    }[kind]
    return tuple(None if r is None else (r - mean) * scale for r in rewards)


def overlong_penalty(tokens: int, limit: int, margin: int) -> float:
    """What a rollout of `tokens` sampled tokens loses of its reward (soft overlong punishment, DAPO, arXiv
    2503.14476): 0 up to limit - margin, 1 from the limit on, rising evenly in between. limit 0 = nothing."""
    if not limit:
        return 0.0
    return min(1.0, max(0.0, (tokens - (limit - margin)) / margin))
