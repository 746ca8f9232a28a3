"""Inputs of a step's losses beyond single forward passes.

The trainer's own log-probabilities before the first update, the reference's, and per-rollout means. A
rollout's rows may be in several micro-batches, so per-rollout values come from an earlier pass without
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from insitu.config.training import LossConfig
from insitu_train.loss.losses import LossInputs
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.step import StepPlan

Rows = Mapping[int, Tensor]
"""Row index in the plan -> one value per trained token."""


class StepInputs:
    """Inputs of one step, over all its epochs."""

    def __init__(self, plan: StepPlan, config: LossConfig, whole: StepPlan | None = None) -> None:
        """Take a plan; `whole` is the one with all trained tokens of rows that several ranks share."""
        self._plan, self._config = plan, config
        names: dict[str, int] = {}
        self._rollout = [names.setdefault(row.rollout_id, len(names)) for row in plan.rows]
        counts = [int(row.mask.sum()) for row in (whole or plan).rows]
        self._tokens = np.bincount(self._rollout, counts, len(names)) if names else np.zeros(0)
        self._prox: dict[int, Tensor] = {}
        self._ref: dict[int, Tensor] = {}
        self._live_mu: Tensor | None = None
        self._live_prox: Tensor | None = None
        self._prox_mu: Tensor | None = None

    def set_logprobs(self, live: Rows, epoch: int, combine: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        """Update from the current log-probabilities of this rank's rows.

        combine: sums [rollouts] float64 over ranks.
        """
        mu = {i: torch.from_numpy(row.logprobs[row.mask]) for i, row in enumerate(self._plan.rows)}
        self._live_mu = self._means(live, mu, combine)
        if epoch == 0:
            self._prox.update(live)
            self._live_prox = torch.zeros_like(self._live_mu)
            self._prox_mu = self._live_mu
            if self._config.correction_level == "rollout":
                self._prox_mu = self._live_mu * torch.from_numpy(self._tokens)
        else:
            self._live_prox = self._means(live, self._prox, combine)

    def _means(self, live: Rows, other: Rows, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [rollouts] float64: mean over a rollout's trained tokens of live - other."""
        sums = torch.zeros(len(self._tokens), dtype=torch.float64)
        for i, logp in live.items():
            sums[self._rollout[i]] += (logp.double().cpu() - other[i].double().cpu()).sum()
        return combine(sums) / torch.from_numpy(self._tokens).clamp(min=1)

    def remember(self, micro: MicroBatch, logp: Tensor, ref: Tensor | None) -> None:
        """Keep a micro-batch's log-probabilities of the first epoch for later epochs."""
        counts = [int(self._plan.rows[i].mask.sum()) for i in micro.rows]
        self._prox.update(zip(micro.rows, torch.split(logp.detach(), counts), strict=True))
        if ref is not None:
            self._ref.update(zip(micro.rows, torch.split(ref, counts), strict=True))

    def reference(self, micro: MicroBatch) -> Tensor | None:
        """Return the reference log-probabilities [N] passed to `remember`."""
        return torch.cat([self._ref[i] for i in micro.rows]) if micro.rows[0] in self._ref else None

    def of(self, micro: MicroBatch, mu: Tensor, advantage: Tensor, ref: Tensor | None) -> LossInputs:
        """Return the loss inputs of a micro-batch's trained tokens, row by row.

        mu, advantage and ref are [N].
        """
        known = micro.rows[0] in self._prox
        return LossInputs(
            mu=mu,
            advantage=advantage,
            prox=torch.cat([self._prox[i] for i in micro.rows]) if known else None,
            ref=ref,
            live_mu=self._spread(self._live_mu, micro.rows, mu),
            live_prox=self._spread(self._live_prox, micro.rows, mu),
            prox_mu=self._spread(self._prox_mu, micro.rows, mu),
        )

    def _spread(self, of_rollout: Tensor | None, rows: Sequence[int], like: Tensor) -> Tensor | None:
        if of_rollout is None:
            return None
        counts = torch.tensor([int(self._plan.rows[i].mask.sum()) for i in rows])
        values = of_rollout[[self._rollout[i] for i in rows]].repeat_interleave(counts)
        return values.to(like.device, like.dtype)
