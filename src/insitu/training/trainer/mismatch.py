"""Which tokens sampler and trainer disagree about, and whether that is rounding or a fault of the path.

Both compute in the same precision, in another order. Where the model is badly conditioned, which is rare and
no fault, their numbers part by more than elsewhere. Such a token is not trained: its ratio would be noise. A
fault shows in many tokens or by far, and there is no update (decision 0054). Called by trainer/trainer.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu.training.loss.metrics import LossSums
from insitu.training.trainer.batch import TensorBatch, locate

SHARE = 1e-3
"""Largest share of a step's tokens that rounding explains; one token always."""
FAR = 10.0
"""Times the limit from which a gap is never rounding."""


def over(logp: Tensor, mu: Tensor, current: Tensor, limit: float) -> Tensor:
    """Of tokens [N] those of the current version whose |logp - mu| is above the limit, or is nan."""
    return current & ~((logp.detach() - mu).abs() <= limit)


class Mismatch:
    """Compares the tokens of one step with the sampler's record, micro-batch after micro-batch."""

    def __init__(self, limit: float, version: int) -> None:
        self._limit, self._version = limit, version
        self._worst, self._named = 0.0, ""

    def over(self, batch: TensorBatch, logp: Tensor, part: slice) -> Tensor:
        """Which tokens of `part` are not to be trained."""
        return over(logp, batch.mu[part], batch.versions[part] == self._version, self._limit)

    def count(self, batch: TensorBatch, logp: Tensor, sums: LossSums) -> Tensor | None:
        """Add a micro-batch to the sums; which of its tokens are over the limit, None = none. Raises
        TrainError for a gap that is no rounding, naming the token."""
        current = batch.versions == self._version
        log_rho = torch.where(current, logp - batch.mu, 0.0)
        gap = log_rho.abs()
        apart = over(logp, batch.mu, current, self._limit)
        sums.compare(logp - batch.mu, current)
        sums.seen = max(sums.seen, float(gap.max()))
        if not bool(apart.any()):
            sums.gap = max(sums.gap, float(gap.max()))
            return None
        worst = int(torch.nan_to_num(gap, nan=math.inf).argmax())
        self._name(batch, worst, float(gap[worst]))
        if not float(gap[worst]) <= FAR * self._limit:
            raise TrainError(f"{self._named}: no update")
        sums.apart += int(apart.sum())
        sums.gap = max(sums.gap, float(torch.where(apart, 0.0, gap).max()))
        return apart

    def judge(self, sums: LossSums) -> None:
        """Raises TrainError when more tokens of the whole step are over the limit than rounding explains."""
        if sums.apart > max(1, int(SHARE * sums.tokens)):
            named = f", for one {self._named}" if self._named else ""
            raise TrainError(
                f"trainer and sampler differ by more than {self._limit:g} in {sums.apart} of {sums.tokens}"
                f" tokens{named}: no update"
            )

    def _name(self, batch: TensorBatch, worst: int, gap: float) -> None:
        if gap <= self._worst:
            return
        row, token = locate(batch, worst)
        self._worst = gap
        self._named = (
            f"rollout {row.rollout_id} segment {row.segment} token {token}: trainer and sampler differ by"
            f" {gap:.3g} in log-probability at version {self._version}, over the limit of {self._limit:g}"
            " (train.max_logprob_gap)"
        )
