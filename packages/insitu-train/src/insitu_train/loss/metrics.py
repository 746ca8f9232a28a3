"""Metrics of a training step: sums over its tokens, and the numbers and warnings computed from them.

All numbers of `LossSums` are summed over micro-batches and ranks, except `gap` and `seen`, which are maxima.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from insitu_train.loss.losses import TokenLoss
from insitu_train.options import StepResult, TrainConfig


@dataclass(slots=True)
class LossSums:
    """Sums of one epoch over its tokens."""

    loss: float = 0.0
    entropy: float = 0.0
    cut: int = 0
    cut_low: int = 0
    """Cut, with negative advantage."""
    corrected: int = 0
    ref_kl: float = 0.0
    k3: float = 0.0
    """rho - 1 - log rho of tokens of the current version."""
    gap: float = 0.0
    """Largest |log rho| of the tokens of the current version that are trained."""
    seen: float = 0.0
    """The same over all compared tokens."""
    mismatched: int = 0
    """Tokens excluded because sampler and trainer disagree."""
    current: int = 0
    """Tokens sampled by the current version."""
    off_policy: float = 0.0
    """rho - 1 - log rho of all tokens."""
    rho: float = 0.0
    rho_squares: float = 0.0
    tokens: int = 0
    kl_of_sets: dict[str, list[float]] = field(default_factory=dict)
    """Named task set -> `ref_kl` and number of its tokens."""

    def add(self, out: TokenLoss, advantage: Tensor) -> None:
        """Add a micro-batch's tokens."""
        self.cut += int(out.cut.sum())
        self.cut_low += int((out.cut & (advantage < 0)).sum())
        if out.corrected is not None:
            self.corrected += int(out.corrected.sum())
        if out.kl is not None:
            self.ref_kl += float(out.kl.double().sum())
        self.tokens += len(out.cut)

    def add_sets(self, kl: Tensor, parts: Sequence[str], counts: Sequence[int]) -> None:
        """Add the divergence of a micro-batch's tokens to their task sets. parts, counts: of its rows."""
        for part, own in zip(parts, torch.split(kl.double(), list(counts)), strict=True):
            if part:
                total, tokens = self.kl_of_sets.get(part, (0.0, 0))
                self.kl_of_sets[part] = [total + float(own.sum()), tokens + len(own)]

    def compare(self, log_rho: Tensor, current: Tensor) -> None:
        """Add the ratios [N] of trainer to sampler before the first update."""
        exact = log_rho.double()
        rho = exact.exp()
        k3 = rho - 1.0 - exact
        self.k3 += float(k3[current].sum())
        self.current += int(current.sum())
        self.off_policy += float(k3.sum())
        self.rho += float(rho.sum())
        self.rho_squares += float(rho.square().sum())

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens; 1 where nothing was compared."""
        return self.rho**2 / (self.tokens * self.rho_squares) if self.rho_squares else 1.0


def result_of(epochs: Sequence[LossSums], config: TrainConfig) -> StepResult:
    """Return the part of a step's result that comes from sums.

    Policy metrics are from before the first update, clip fractions are means over epochs.
    """
    first = epochs[0]
    counted = first.tokens * len(epochs)
    off_policy_kl, ref_kl = first.off_policy / first.tokens, first.ref_kl / first.tokens
    cut, low = sum(s.cut for s in epochs), sum(s.cut_low for s in epochs)
    return StepResult(
        optimizer_steps=0,
        version=0,
        loss=first.loss,
        entropy=first.entropy / first.tokens,
        clip_fraction=cut / counted,
        clip_low_fraction=low / counted,
        clip_high_fraction=(cut - low) / counted,
        corrected_fraction=sum(s.corrected for s in epochs) / counted,
        mismatch_kl=first.k3 / max(1, first.current),
        off_policy_kl=off_policy_kl,
        ess=first.ess,
        ref_kl=ref_kl,
        ref_kl_of_sets={name: kl / tokens for name, (kl, tokens) in first.kl_of_sets.items() if tokens},
        alarm=_alarm(off_policy_kl, ref_kl, config),
        max_logprob_gap=first.gap,
        max_logprob_gap_seen=first.seen,
        mismatched=first.mismatched,
        tokens=first.tokens - first.mismatched,
    )


def _alarm(off_policy_kl: float, ref_kl: float, config: TrainConfig) -> str:
    """Return warnings for limits that are exceeded, or empty."""
    lines = []
    kl, reference_kl = config.alarms["kl"], config.alarms["reference_kl"]
    if 0 < kl < off_policy_kl:
        lines.append(
            f"KL to the sampling policies is {off_policy_kl:.3g} nats (run.alarms.kl ="
            f" {kl:g}): lower train.lr, collect.max_staleness, or set train.correction"
        )
    if config.loss.kl != "none" and 0 < reference_kl < ref_kl:
        lines.append(
            f"KL to the reference policy is {ref_kl:.3g} nats (run.alarms.reference_kl = {reference_kl:g})"
        )
    return "; ".join(lines)
