"""Policy-gradient losses per token, to be minimised. Every one is a function of the token's live logp alone,
given its `LossInputs`, so that a head may take loss and slope of a tile of tokens at once.

p = exp(logp); mu is the sampler's recorded log-probability, old the trainer's before the step's first update
(ratio = trainer) or mu (ratio = sampler). rho = exp(logp - mu), r = exp(logp - old), w = exp(old - mu); A is
the advantage, sg stops the gradient.

dppo (DPPO-Binary-TV, arXiv 2602.04879, with the quadratic pull of Kimi K2.5, arXiv 2602.02276):
    -rho A, but 0 where A > 0 and p - p_mu > high, or A < 0 and p - p_mu < -low;  + tau log^2 rho everywhere
ppo_clip (arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729, the same bound
as the two-sided clip of arXiv 2505.07291):  -min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A
cispo (arXiv 2506.13585):  -sg(min(r, cap)) A logp
gspo (arXiv 2507.18071):  ppo_clip on s = the geometric mean of r over the rollout; each token carries 1/n
decoupled (arXiv 2505.24298):  sg(w) times ppo_clip with ratio = trainer
nll (supervised; mu is not looked at):  -A logp
Corrections by w are in correct.py, the pull to a reference in kl.py; both leave dppo's own pull alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from insitu.config.training import LossConfig
from insitu.errors import TrainError
from insitu.registry import find
from insitu.training.loss.importance import correct, off_policy_keeps
from insitu.training.loss.kl import divergence


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss of N tokens is made of, besides their live log-probability. All [N], no gradients."""

    mu: Tensor
    """The sampler's log-probability."""
    advantage: Tensor
    """Its rollout's."""
    prox: Tensor | None = None
    """The trainer's log-probability before the step's first update; None = nothing was updated since, so it
    is the live one."""
    ref: Tensor | None = None
    """The reference policy's log-probability."""
    live_mu: Tensor | None = None
    """Mean of live - mu over its rollout."""
    live_prox: Tensor | None = None
    """Mean of live - prox over its rollout; None with `prox` None = 0."""
    prox_mu: Tensor | None = None
    """log w of its rollout, as the correction's level says."""

    def part(self, part: slice) -> LossInputs:
        """Those of some of the tokens."""

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[part]

        return LossInputs(
            mu=self.mu[part],
            advantage=self.advantage[part],
            prox=some(self.prox),
            ref=some(self.ref),
            live_mu=some(self.live_mu),
            live_prox=some(self.live_prox),
            prox_mu=some(self.prox_mu),
        )


LossFunction = Callable[[Tensor, LossInputs, LossConfig], Tensor | tuple[Tensor, Tensor]]
"""(logp [N] with gradient, inputs, [train]) -> loss [N], or (loss [N], bool [N]: the clip bounds this token).

The loss of a token depends on no other token: it is called with parts of a batch.
"""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of N tokens."""

    loss: Tensor
    """[N]; carries the gradient."""
    cut: Tensor
    """[N] bool: the clip or mask of the loss itself bounds this token's gradient."""
    corrected: Tensor | None = None
    """[N] bool: the correction or off_policy_mask bounded this token or left it out; None without either."""
    kl: Tensor | None = None
    """[N] estimated divergence from the reference, no gradient; None without a reference."""


def token_loss(logp: Tensor, terms: LossInputs, config: LossConfig) -> TokenLoss:
    """logp [N], carries the gradient. Raises TrainError when a log-probability that it needs is missing."""
    loss, cut = _policy_loss(logp, terms, config)
    loss, corrected = _corrected(loss, logp, terms, config)
    if config.loss == "dppo":
        loss = config.dppo_tau * (logp - terms.mu).square() + loss
    if config.kl == "none":
        return TokenLoss(loss, cut, corrected)
    kl = divergence(logp, _needed(terms.ref, "reference", config), config.kl)
    if config.kl_weight:
        pull = kl
        if config.kl_unbiased:
            ratio = (logp - _old(logp, terms, config)).exp()
            # k2's slope is d already: the ratio must only weigh it.
            pull = kl * (ratio.detach() if config.kl == "k2" else ratio)
        loss = loss + config.kl_weight * pull
    return TokenLoss(loss, cut, corrected, kl.detach())


def _policy_loss(logp: Tensor, terms: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the policy term of the configured loss and where its clip bounds the gradient, both [N]."""
    result = _loss_function(config.loss)(logp, terms, config)
    loss, cut = result if isinstance(result, tuple) else (result, torch.zeros_like(logp, dtype=torch.bool))
    if not isinstance(loss, Tensor) or loss.shape != logp.shape or cut.shape != logp.shape:
        raise TrainError(f"loss {config.loss} did not return a tensor of shape {list(logp.shape)}")
    return loss, cut


@lru_cache(maxsize=16)
def _loss_function(name: str) -> LossFunction:
    found: LossFunction = find("losses", name)
    return found


def _needed(tensor: Tensor | None, what: str, config: LossConfig) -> Tensor:
    if tensor is None:
        raise TrainError(f"loss {config.loss} lacks the {what} log-probabilities that it was asked to use")
    return tensor


def _prox(logp: Tensor, terms: LossInputs) -> Tensor:
    return logp.detach() if terms.prox is None else terms.prox


def _old(logp: Tensor, terms: LossInputs, config: LossConfig) -> Tensor:
    return _prox(logp, terms) if config.trainer_ratio else terms.mu


def _corrected(
    loss: Tensor, logp: Tensor, terms: LossInputs, config: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """The policy term under corrections, and where they bound it."""
    bounded: Tensor | None = None
    if config.correction != "none" or config.loss == "decoupled":
        log_w = _prox(logp, terms) - terms.mu
        if config.correction != "none" and config.correction_level != "token":
            log_w = _needed(terms.prox_mu, "trainer's own", config)
        factor, bounded = correct(log_w, config)
        loss = loss * factor
    if config.off_policy_mask:
        kept = off_policy_keeps(
            _needed(terms.live_mu, "sampler's", config), terms.advantage, config.off_policy_mask
        )
        loss = torch.where(kept, loss, 0.0)
        bounded = ~kept if bounded is None else bounded | ~kept
    return loss, bounded


# --------------------------------------------------------------------------- policy terms


def nll(logp: Tensor, terms: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    return -terms.advantage * logp, torch.zeros_like(logp, dtype=torch.bool)


def dppo(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    moved = logp.detach().exp() - terms.mu.exp()
    a = terms.advantage
    cut = ((a > 0) & (moved > c.dppo_high)) | ((a < 0) & (moved < -c.dppo_low))
    return -torch.where(cut, 0.0, (logp - terms.mu).exp() * a), cut


def ppo_clip(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    ratio = (logp - _old(logp, terms, c)).exp()
    return _clipped(ratio, terms.advantage, c.clip_low, c.clip_high, c.dual_clip)


def _clipped(ratio: Tensor, a: Tensor, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    free = -ratio * a
    loss = torch.maximum(free, -ratio.clamp(1.0 - low, 1.0 + high) * a)
    cut = loss.detach() > free.detach()
    if dual:
        bound = -dual * a
        over = (a < 0) & (loss.detach() > bound)
        loss = torch.where(over, bound, loss)
        cut = cut | over
    return loss, cut


def cispo(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    ratio = (logp.detach() - _old(logp, terms, c)).exp()
    return -ratio.clamp(max=c.cispo_cap) * terms.advantage * logp, ratio > c.cispo_cap


def gspo(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    """The rollout's ratio stands still here; its slope comes in through each token's own logp."""
    if not c.trainer_ratio:
        moved = _needed(terms.live_mu, "sampler's", c)
    elif terms.live_prox is None and terms.prox is None:
        moved = torch.zeros_like(logp)
    else:
        moved = _needed(terms.live_prox, "trainer's own", c)
    ratio = (moved + logp - logp.detach()).exp()
    return _clipped(ratio, terms.advantage, c.gspo_low, c.gspo_high, 0.0)
