"""Finds tokens on which sampler and trainer disagree, and decides between rounding and a bug.

Both compute in the same precision in a different order. Where the model is badly conditioned, their numbers
differ by more than elsewhere; such a token is excluded, since its ratio would be noise. A bug shows in many
tokens or in large gaps, and then there is no update (docs/internals/training.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from insitu.errors import BadStepError
from insitu_train.loss.metrics import LossSums
from insitu_train.options import StepResult, TrainConfig
from insitu_train.trainer.batch import TensorBatch, locate

SHARE = 1e-3
"""Largest share of a step's tokens that rounding explains; one token always."""
FAR = 10.0
"""Multiple of the limit above which a gap is never rounding."""


def _over(logp: Tensor, mu: Tensor, current: Tensor, limit: float) -> Tensor:
    """Return [N] bool: tokens of the current version whose |logp - mu| is above the limit, or nan."""
    return current & ~((logp.detach() - mu).abs() <= limit)


def refused(error: BadStepError, config: TrainConfig, steps: int, version: int) -> StepResult:
    """Return the result of a refused step; raise the error where such a step ends the run."""
    if config.on_bad_step == "stop":
        raise BadStepError(f"{error} (train.on_bad_step = 'skip' would drop the step)") from error
    return StepResult(optimizer_steps=steps, version=version, skipped=str(error), bad=True)


class Mismatch:
    """Compares one step's tokens with the sampler's record, per micro-batch."""

    def __init__(self, limit: float, version: int) -> None:
        self._limit, self._version = limit, version
        self._worst, self._named = 0.0, ""

    def over(self, batch: TensorBatch, logp: Tensor, part: slice) -> Tensor:
        """Return which tokens of `part` are excluded."""
        return _over(logp, batch.mu[part], batch.versions[part] == self._version, self._limit)

    def count(self, batch: TensorBatch, logp: Tensor, sums: LossSums) -> Tensor | None:
        """Add a micro-batch to the sums; return its tokens over the limit, None = none.

        Raises BadStepError, naming the token, for a gap that rounding cannot explain.
        """
        if not len(logp):
            return None  # the trained tokens of this row are other ranks'
        current = batch.versions == self._version
        log_rho = torch.where(current, logp - batch.mu, 0.0)
        gap = log_rho.abs()
        excluded = _over(logp, batch.mu, current, self._limit)
        sums.compare(logp - batch.mu, current)
        sums.seen = max(sums.seen, float(gap.max()))
        if not bool(excluded.any()):
            sums.gap = max(sums.gap, float(gap.max()))
            return None
        worst = int(torch.nan_to_num(gap, nan=math.inf).argmax())
        self._name(batch, worst, float(gap[worst]))
        if not float(gap[worst]) <= FAR * self._limit:
            raise BadStepError(f"{self._named}: no update")
        sums.mismatched += int(excluded.sum())
        sums.gap = max(sums.gap, float(torch.where(excluded, 0.0, gap).max()))
        return excluded

    def judge(self, sums: LossSums) -> None:
        """Raise BadStepError when more tokens of the step are over the limit than rounding explains."""
        if sums.mismatched > max(1, int(SHARE * sums.tokens)):
            named = f", for one {self._named}" if self._named else ""
            raise BadStepError(
                f"trainer and sampler differ by more than {self._limit:g} in {sums.mismatched} of"
                f" {sums.tokens} tokens{named}: no update"
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
