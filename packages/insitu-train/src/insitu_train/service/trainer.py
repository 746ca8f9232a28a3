"""Train a plan at a service: its log-probabilities come here, the derivative of the loss goes back.

One pass returns the service's log-probabilities of every token. The step's loss, any of `training.loss`, is
a function of those, so its derivative by each of them is all that the service needs for the gradient. So
every loss, correction and exclusion is the one of local training, at the price of a pass without gradients.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from insitu.errors import BadStepError, EngineError, TrainError
from insitu.types import FloatArray
from insitu_train.loss.fused_head import Scores
from insitu_train.loss.inputs import StepInputs
from insitu_train.loss.losses import token_loss
from insitu_train.loss.metrics import LossSums, result_of
from insitu_train.options import StepResult, TrainConfig, rate
from insitu_train.plan.step import PlanRow, StepPlan, check_versions
from insitu_train.service.reduction import Reduction
from insitu_train.service.session import TrainingRun
from insitu_train.trainer.batch import make_batch
from insitu_train.trainer.mismatch import Mismatch, refused
from insitu_train.trainer.score_recorder import ScoreRecorder


class HalfDoneError(EngineError):
    """A step failed after its gradient was begun: the state at the service is unknown."""


class ServiceTrainer:
    """A training run at the service, with its step count and policy version."""

    def __init__(self, run: TrainingRun, config: TrainConfig, reduction: Reduction) -> None:
        self.run, self.config, self._reduction = run, config, reduction
        self.steps = 0
        """Optimizer steps done."""
        self.version = 0
        """+1 with every update of the weights."""
        self._recorder: ScoreRecorder | None = None

    def step(self, plan: StepPlan, scores: Path | None = None) -> StepResult:
        """Train one plan. A plan without rows is skipped and leaves the version unchanged.

        scores: file for scores of trained tokens, as for `Trainer.step`; their entropy is nan.

        Raises TrainError, with the weights unchanged, when sampler and trainer disagree, a version is
        impossible or a loss is not finite; HalfDoneError when the service fails after the gradient began.
        """
        began = time.monotonic()
        if not plan.rows:
            return StepResult(
                optimizer_steps=self.steps, version=self.version, skipped=plan.skipped or "nothing to train"
            )
        check_versions(plan, self.version, self.config.max_staleness)
        terms, every, lr = StepInputs(plan, self.config.loss), [], 0.0
        excluded: list[Tensor | None] = []
        self._recorder = None if scores is None else ScoreRecorder(plan, scores, 0)
        for epoch in range(self.config.epochs):
            try:
                sums = self._gradient(plan, terms, epoch, excluded)
                lr = self._update(epoch)
            except (EngineError, TrainError) as error:
                if epoch or isinstance(error, HalfDoneError):
                    raise HalfDoneError(str(error)) from error
                if isinstance(error, BadStepError):
                    return refused(error, self.config, self.steps, self.version)
                raise
            every.append(sums)
        self.steps += self.config.epochs
        self.version += 1
        if self._recorder is not None:
            self._recorder.write()
        return replace(
            result_of(every, self.config),
            optimizer_steps=self.steps,
            version=self.version,
            grad_norm=None,
            lr=lr,
            rows=len(plan.rows),
            row_tokens=sum(len(row.ids) for row in plan.rows),
            micro_batches=len(plan.batches),
            seconds=time.monotonic() - began,
        )

    def _gradient(
        self, plan: StepPlan, terms: StepInputs, epoch: int, excluded: list[Tensor | None]
    ) -> LossSums:
        """Add the gradient of the step's loss at the service; return the sums of its tokens."""
        ids = [row.ids for row in plan.rows]
        known = self.run.logprobs(ids)
        live = {i: _trained(row, known[i]) for i, row in enumerate(plan.rows)}
        if self.config.loss.needs_old_logprobs(epoch):
            terms.set_logprobs(live, epoch)
        sums, slopes = self._slopes(plan, terms, live, epoch, excluded)
        if not (math.isfinite(sums.loss) and all(np.isfinite(s).all() for s in slopes)):
            raise BadStepError(f"step {self.steps}: loss {sums.loss} or its derivative: no update")
        factors = self._reduction.factors([len(k) for k in known])
        sent = [-slope * factor for slope, factor in zip(slopes, factors, strict=True)]
        try:
            self.run.backward(ids, known, sent)
        except EngineError as error:
            raise HalfDoneError(str(error)) from error
        return sums

    def _slopes(
        self,
        plan: StepPlan,
        terms: StepInputs,
        live: dict[int, Tensor],
        epoch: int,
        excluded: list[Tensor | None],
    ) -> tuple[LossSums, list[FloatArray]]:
        """Return the sums, and per row the derivative of the step's loss by each token's log-probability.

        excluded: per micro-batch the tokens on which sampler and trainer disagree, found in the first epoch.
        """
        sums = LossSums()
        slopes = [np.zeros(len(row.ids) - 1, np.float32) for row in plan.rows]
        mismatch = Mismatch(self.config.max_logprob_gap, self.version) if epoch == 0 else None
        for at, micro in enumerate(plan.batches):
            batch = make_batch(plan, micro)
            logp = torch.cat([live[i] for i in micro.rows]).requires_grad_()
            live_logp = logp.detach()
            if mismatch is not None:
                excluded.append(mismatch.count(batch, live_logp, sums))
            given = terms.of(micro, batch.mu, batch.advantage, None)
            out = token_loss(logp, given, self.config.loss)
            weighted = out.loss * batch.weight
            if (never := excluded[at]) is not None:
                weighted = torch.where(never, 0.0, weighted)
            total = weighted.sum()
            (slope_of,) = torch.autograd.grad(total, logp)
            sums.loss += float(total.detach())
            sums.add(out, batch.advantage)
            if self._recorder is not None and epoch == 0:
                nan = torch.full_like(live_logp, torch.nan)
                found = Scores(logp=live_logp, entropy=nan, best=torch.zeros_like(nan, dtype=torch.bool))
                self._recorder.add(micro, batch, found, out, never)
            # Tokens sampled by this policy: the mean of -log p estimates its entropy without bias.
            sums.entropy -= float(live_logp.double().sum())
            if epoch == 0 and self.config.epochs > 1:
                terms.remember(micro, logp, None)
            for i, slope in zip(micro.rows, torch.split(slope_of, batch.counts), strict=True):
                slopes[i][plan.rows[i].mask[1:]] = slope.numpy()
        if mismatch is not None:
            mismatch.judge(sums)
        return sums, slopes

    def _update(self, epoch: int) -> float:
        """Apply the gradient; return the learning rate."""
        optim = self.config.optim
        lr = optim.lr * rate(optim, self.steps + epoch)
        try:
            self.run.update(optim, lr)
        except EngineError as error:
            raise HalfDoneError(str(error)) from error
        return lr


def _trained(row: PlanRow, logprobs: FloatArray) -> Tensor:
    """Return the log-probabilities of a row's trained tokens."""
    return torch.from_numpy(logprobs[row.mask[1:]])
