"""Policy-gradient losses per token, to be minimised. All work from (logp, mu, advantage) alone.

logp is the live policy's log-probability, mu the sampler's recorded one, rho = exp(logp - mu).

dppo (DPPO-Binary-TV, arXiv 2602.04879, with the quadratic pull of Kimi K2.5, arXiv 2602.02276):
    -rho A, but 0 where A > 0 and p - p_mu > high, or A < 0 and p - p_mu < -low;  + tau log^2 rho everywhere
ppo_clip (arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729):
    -min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most -c A
nll (supervised; mu is not looked at):
    -A logp
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.train.options import LossConfig


def token_loss(logp: Tensor, mu: Tensor, advantage: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """All [N] -> (loss [N], cut [N] bool: the policy-gradient term of this token gives no gradient)."""
    if config.name == "nll":
        return -advantage * logp, torch.zeros_like(logp, dtype=torch.bool)
    if config.name == "dppo":
        return _dppo(logp, mu, advantage, config)
    return _ppo_clip(logp, mu, advantage, config)


def _dppo(logp: Tensor, mu: Tensor, advantage: Tensor, c: LossConfig) -> tuple[Tensor, Tensor]:
    log_rho = logp - mu
    moved = logp.detach().exp() - mu.exp()
    cut = ((advantage > 0) & (moved > c.dppo_high)) | ((advantage < 0) & (moved < -c.dppo_low))
    gain = torch.where(cut, 0.0, log_rho.exp() * advantage)
    return c.dppo_tau * log_rho.square() - gain, cut


def _ppo_clip(logp: Tensor, mu: Tensor, advantage: Tensor, c: LossConfig) -> tuple[Tensor, Tensor]:
    rho = (logp - mu).exp()
    free = -rho * advantage
    loss = torch.maximum(free, -rho.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * advantage)
    cut = loss.detach() > free.detach()
    if c.dual_clip:
        bound = -c.dual_clip * advantage
        over = (advantage < 0) & (loss.detach() > bound)
        loss = torch.where(over, bound, loss)
        cut = cut | over
    return loss, cut


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """The step's objective from token losses and row weights, both [N]: one plain sum."""
    return (loss * weight).sum()
