"""Supervised training on demonstrated tokens: the warm start before RL.

One call of `Sft.step` is one optimizer step. A batch is a shared prefix (computed once, with gradients) and
right-padded rows. The loss is the mean over masked tokens of the whole batch, however it is divided into
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from insitu.errors import TrainError
from insitu.types import BoolArray, FloatArray, IntArray
from insitu_train.loss.fused_head import score_masked
from insitu_train.model.base import Policy
from insitu_train.options import OptimConfig
from insitu_train.trainer.optimizer import Optimiser


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Settings of supervised training."""

    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=3e-3, muon_lr=0.02, warmup_steps=50, decay="linear", total_steps=1500
        )
    )
    micro_rows: int = 64
    """Rows in one forward and backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTensors:
    """Right-padded rows [B, T] after a shared prefix [P]; mask True = target."""

    prefix: IntArray
    rows: IntArray
    mask: BoolArray
    weights: FloatArray | None = None
    """[B] weight of every target of a row; None = 1."""


class Sft:
    """A model under supervised training. `step` and `evaluate` return (loss, accuracy)."""

    def __init__(self, model: Policy, config: SftConfig) -> None:
        self.model, self.config = model, config
        self.optimiser = Optimiser(model, config.optim)
        self.steps = 0

    def step(
        self, prefix: IntArray, rows: IntArray, mask: BoolArray, weights: FloatArray | None = None
    ) -> tuple[float, float]:
        """Run one update. Token t of a row is predicted from position t-1; token 0 from the prefix's last.

        Returns the weighted mean loss in nats and the argmax accuracy over masked tokens before the update.
        Raises TrainError for a batch without targets, a target without predictor and a loss or gradient that
        is not finite (weights unchanged).
        """
        self.optimiser.zero()
        loss, accuracy = self._pass(SftTensors(prefix=prefix, rows=rows, mask=mask, weights=weights), True)
        norm = self.optimiser.clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimiser.zero()
            raise TrainError(f"sft step {self.steps}: loss {loss}, gradient norm {norm}")
        self.optimiser.update(self.steps)
        self.steps += 1
        return loss, accuracy

    def evaluate(self, prefix: IntArray, rows: IntArray, mask: BoolArray) -> tuple[float, float]:
        """Return loss and argmax accuracy of a batch; changes nothing."""
        with torch.no_grad():
            return self._pass(SftTensors(prefix=prefix, rows=rows, mask=mask), False)

    def run(
        self, batches: Iterable[SftTensors], report: Callable[[int, float, float], None] | None = None
    ) -> tuple[float, float]:
        """Train on `batches`, calling report(step, loss, accuracy); return the last pair."""
        last = (math.nan, math.nan)
        for batch in batches:
            last = self.step(batch.prefix, batch.rows, batch.mask, batch.weights)
            if report is not None:
                report(self.steps, *last)
        return last

    def _pass(self, batch: SftTensors, train: bool) -> tuple[float, float]:
        """Run forward over all micro-batches, backward when `train`."""
        _check(batch)
        weights = np.ones(batch.rows.shape[0], np.float32) if batch.weights is None else batch.weights
        total = float(weights.astype(np.float64) @ batch.mask.sum(1))
        prefix = torch.from_numpy(batch.prefix.astype(np.int64))
        loss, hits = 0.0, 0
        for at in range(0, batch.rows.shape[0], self.config.micro_rows):
            part = slice(at, at + self.config.micro_rows)
            if not batch.mask[part].any():
                continue
            rows, mask = (
                torch.from_numpy(batch.rows[part].astype(np.int64)),
                torch.from_numpy(batch.mask[part]),
            )
            scores, row = score_masked(self.model, prefix, rows, mask, 1.0)
            weight = torch.from_numpy(weights[part].astype(np.float32))[row] / total
            piece = -(scores.logp * weight).sum()
            if train:
                piece.backward()  # type: ignore[no-untyped-call]
            loss += float(piece.detach())
            hits += int(scores.best.sum())
        return loss, hits / int(batch.mask.sum())


def _check(batch: SftTensors) -> None:
    if batch.rows.shape != batch.mask.shape or batch.rows.ndim != 2:
        raise TrainError(f"sft: rows {batch.rows.shape} and mask {batch.mask.shape} must be one [B, T]")
    if not batch.mask.any():
        raise TrainError("sft: the batch has no target token")
    if not batch.prefix.size and batch.mask[:, 0].any():
        raise TrainError("sft: a row's first token is a target without a predictor")
    if batch.weights is not None and not float(batch.weights @ batch.mask.sum(1)) > 0:
        raise TrainError("sft: the weights of all targets sum to zero")
