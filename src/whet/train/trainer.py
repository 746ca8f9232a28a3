"""The trainer: one plan in, one update per epoch out, or a refusal that leaves the weights as they were.

Its log-probabilities come from a full forward without any cache of the sampler's. The first forward measures
them against the sampler's record: tokens of the current version must agree, which proves the whole path from
the sampled id to the training row. Same plan, weights and thread count give the same bits. Called by
learner.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from whet.errors import TrainError
from whet.train.head import Scores, score_masked
from whet.train.loss import token_loss, weighted
from whet.train.optim import Optimiser
from whet.train.options import StepResult, TrainConfig
from whet.train.pack import MicroBatch
from whet.train.plan import Row, StepPlan
from whet.train.policy import Policy


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as tensors; the per-token ones list masked tokens, row by row."""

    rows: tuple[Row, ...]
    prefix: Tensor
    """[P] int64."""
    ids: Tensor
    """[B, T] int64, the rests of the rows, right-padded with 0."""
    mask: Tensor
    """[B, T] bool."""
    mu: Tensor
    """[N] the sampler's log-probabilities."""
    versions: Tensor
    """[N] int32."""
    advantage: Tensor
    """[N] its row's."""
    weight: Tensor
    """[N] its row's."""


def make_batch(plan: StepPlan, micro: MicroBatch, device: torch.device | None = None) -> Batch:
    """Lay one micro-batch of a plan out as tensors; those per masked token on `device`."""
    rows = tuple(plan.rows[i] for i in micro.rows)
    cut = micro.prefix
    width = max(len(row.ids) for row in rows) - cut
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.bool_)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids) - cut] = row.ids[cut:]
        mask[at, : len(row.ids) - cut] = row.mask[cut:]
    counts = mask.sum(1)
    if int(counts.sum()) != sum(int(row.mask.sum()) for row in rows):
        raise TrainError(f"a micro-batch's prefix of {cut} tokens covers trained tokens")
    return Batch(
        rows=rows,
        prefix=torch.from_numpy(rows[0].ids[:cut].astype(np.int64)),
        ids=torch.from_numpy(ids),
        mask=torch.from_numpy(mask),
        mu=torch.from_numpy(np.concatenate([row.logprobs[row.mask] for row in rows])).to(device),
        versions=torch.from_numpy(np.concatenate([row.versions[row.mask] for row in rows])).to(device),
        advantage=torch.from_numpy(np.repeat([row.advantage for row in rows], counts).astype(np.float32)).to(
            device
        ),
        weight=torch.from_numpy(np.repeat([row.weight for row in rows], counts).astype(np.float32)).to(
            device
        ),
    )


@dataclass(slots=True)
class _Sums:
    """Sums of one epoch over its tokens."""

    loss: float = 0.0
    entropy: float = 0.0
    cut: int = 0
    k3: float = 0.0
    gap: float = 0.0
    current: int = 0
    """Tokens sampled by the current version."""
    tokens: int = 0


class Trainer:
    """A model under reinforcement learning. Owns the optimiser, the step count and the policy version."""

    def __init__(self, model: Policy, config: TrainConfig, *, version: int = 0) -> None:
        self.model, self.config = model, config
        self.optimiser = Optimiser(model, config.optim)
        self.steps = 0
        """Optimiser steps done."""
        self.version = version
        """+1 with every update of the weights."""

    @property
    def _supervised(self) -> bool:
        """Rows may be of any origin: there is no sampler's record to compare with."""
        return self.config.loss.name == "nll"

    def step(self, plan: StepPlan) -> StepResult:
        """Train one plan. A plan without rows is skipped: nothing changes, the version neither.

        Raises TrainError, with weights and optimiser as before, when a token of the current version differs
        from the sampler's record by more than the limit, when a token's version is too old or unknown, when
        a loss or gradient is not finite, and when a row is longer than the model's context.
        """
        began = time.monotonic()
        if not plan.rows:
            return StepResult(
                step=self.steps, version=self.version, skipped=plan.skipped or "nothing to train"
            )
        self._check_lengths(plan)
        if not self._supervised:
            self._check_versions(plan)
        with self._deterministic():
            # One epoch computes everything before it changes anything; more need a way back.
            before = self._snapshot() if self.config.epochs > 1 else None
            try:
                result = self._epochs(plan)
            except TrainError:
                self.optimiser.zero()
                if before is not None:
                    self._restore(before)
                raise
        return replace(result, seconds=time.monotonic() - began)

    def _epochs(self, plan: StepPlan) -> StepResult:
        first = _Sums()
        norm = lr = 0.0
        cut = 0
        for epoch in range(self.config.epochs):
            self.optimiser.zero()
            sums = self._accumulate(plan, measure=epoch == 0 and not self._supervised)
            norm = self.optimiser.clip()
            if not (math.isfinite(sums.loss) and math.isfinite(norm)):
                raise TrainError(f"step {self.steps}: loss {sums.loss}, gradient norm {norm}: no update")
            lr = self.optimiser.update(self.steps + epoch)
            cut += sums.cut
            first = sums if epoch == 0 else first
        self.optimiser.zero()
        self.steps += self.config.epochs
        self.version += 1
        return StepResult(
            step=self.steps,
            version=self.version,
            loss=first.loss,
            entropy=first.entropy / first.tokens,
            grad_norm=norm,
            clip_fraction=cut / (first.tokens * self.config.epochs),
            mismatch_k3=first.k3 / max(1, first.current),
            max_logprob_gap=first.gap,
            lr=lr,
            tokens=first.tokens,
            rows=len(plan.rows),
            micro_batches=len(plan.batches),
        )

    def gradients(self, plan: StepPlan) -> float:
        """Leave the gradients of the step's loss in `.grad`, change nothing else; returns the loss."""
        self.optimiser.zero()
        with self._deterministic():
            return self._accumulate(plan, measure=False).loss

    def logprobs(self, plan: StepPlan) -> list[Tensor]:
        """Per row of the plan, the trainer's log-probabilities of its trained tokens."""
        found: dict[int, Tensor] = {}
        with self._deterministic(), torch.no_grad():
            for micro in plan.batches:
                batch = make_batch(plan, micro, self.model.device)
                scores = self._scores(batch)
                counts = batch.mask.sum(1).tolist()
                found.update(zip(micro.rows, torch.split(scores.logp, counts), strict=True))
        return [found[i] for i in range(len(plan.rows))]

    def _scores(self, batch: Batch) -> Scores:
        return score_masked(self.model, batch.prefix, batch.ids, batch.mask, self.config.temperature)[0]

    def _accumulate(self, plan: StepPlan, *, measure: bool) -> _Sums:
        """Forward and backward over all micro-batches; `measure` compares with the sampler's record."""
        sums = _Sums()
        for micro in plan.batches:
            batch = make_batch(plan, micro, self.model.device)
            scores = self._scores(batch)
            if measure:
                self._compare(batch, scores.logp.detach(), sums)
            loss, cut = token_loss(scores.logp, batch.mu, batch.advantage, self.config.loss)
            total = weighted(loss, batch.weight)
            total.backward()  # type: ignore[no-untyped-call]
            sums.loss += float(total.detach())
            sums.entropy += float(scores.entropy.sum())
            sums.cut += int(cut.sum())
            sums.tokens += len(cut)
        return sums

    def _compare(self, batch: Batch, logp: Tensor, sums: _Sums) -> None:
        """Mismatch at the same version; raises TrainError over the limit, naming the token."""
        current = batch.versions == self.version
        log_rho = torch.where(current, logp - batch.mu, 0.0)
        gap = log_rho.abs()
        # not <=: a gap that is nan must not pass
        if not bool((gap <= self.config.max_logprob_gap).all()):
            worst = int(torch.nan_to_num(gap, nan=math.inf).argmax())
            row, token = _locate(batch, worst)
            raise TrainError(
                f"rollout {row.rollout_id} segment {row.segment} token {token}: trainer and sampler differ"
                f" by {float(gap[worst]):.3g} in log-probability at version {self.version}, over the limit"
                f" of {self.config.max_logprob_gap:g}: no update"
            )
        sums.gap = max(sums.gap, float(gap.max()))
        sums.k3 += float((log_rho.double().exp() - 1.0 - log_rho.double()).sum())
        sums.current += int(current.sum())

    def _check_lengths(self, plan: StepPlan) -> None:
        limit = self.model.max_positions
        for row in plan.rows:
            if len(row.ids) > limit:
                raise TrainError(
                    f"rollout {row.rollout_id} segment {row.segment}: {len(row.ids)} tokens are more than"
                    f" the model's {limit} positions"
                )

    def _check_versions(self, plan: StepPlan) -> None:
        """A token of a version that cannot be here means a mix-up: a wrong checkpoint, a missed refresh."""
        oldest = self.version - self.config.max_staleness
        for row in plan.rows:
            wrong = row.mask & ((row.versions < oldest) | (row.versions > self.version))
            if wrong.any():
                token = int(wrong.argmax())
                raise TrainError(
                    f"rollout {row.rollout_id} segment {row.segment} token {token} was sampled by version"
                    f" {row.versions[token]}, the trainer is at {self.version} and takes none older than"
                    f" {oldest}: no update"
                )

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {n: p.detach().clone() for n, p in self.optimiser.named.items()}
        return weights, {n: t.clone() for n, t in self.optimiser.tensors().items()}

    def _restore(self, before: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in before[0].items():
                self.optimiser.named[name].copy_(tensor)
        self.optimiser.restore(before[1])

    def _deterministic(self) -> _Pinned:
        return _Pinned(self.config.threads)


class _Pinned:
    """Thread count and deterministic algorithms for the length of a step; the sampler's come back after."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())

    def __enter__(self) -> None:
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self._before[0])
        torch.use_deterministic_algorithms(self._before[1])


def _locate(batch: Batch, token: int) -> tuple[Row, int]:
    """Row and token index within it of the batch's masked token number `token`."""
    for row, positions in _masked(batch):
        if token < len(positions):
            return row, int(positions[token])
        token -= len(positions)
    raise TrainError("a token index lies outside its micro-batch")


def _masked(batch: Batch) -> Iterator[tuple[Row, np.ndarray[tuple[int], np.dtype[np.intp]]]]:
    for row in batch.rows:
        yield row, np.flatnonzero(row.mask)
