"""Corrections for a sampler that differs from the policy before the step, by numerics or staleness.

w = (trainer's probability before the step) / (sampler's), without gradient:

    tis      min(w, high)                        truncated importance sampling
    mask     w where w <= high, else 0           masked importance sampling
    icepop   w where low <= w <= high, else 0    the same on both sides (IcePop)

Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): a rollout with negative advantage is excluded
when the mean over its tokens of log(sampler / live policy) is above a bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insitu.config.training import LossConfig


def correct(log_w: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Map log_w [N] to (factor [N], bounded [N] bool: the correction changed w)."""
    w = log_w.exp()
    if config.correction == "none":
        return w, torch.zeros_like(w, dtype=torch.bool)
    out = w > config.highest_w
    if config.correction == "tis":
        return w.clamp(max=config.highest_w), out
    if config.correction == "icepop":
        out |= w < config.correction_low
    return torch.where(out, 0.0, w), out


def off_policy_keeps(live_mu: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """Map live_mu [N], the mean of live - sampler over the token's rollout, to [N] bool: trained."""
    return (advantage >= 0) | (-live_mu <= bound)
