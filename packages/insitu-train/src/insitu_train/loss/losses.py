"""Policy-gradient losses per token, to be minimised; functions of the token's live logp and `LossInputs`.

p = exp(logp); mu is the sampler's recorded log-probability, old the trainer's before the step's first update
(ratio = trainer) or mu (ratio = sampler). rho = exp(logp - mu), r = exp(logp - old), w = exp(old - mu); A is
the advantage, sg stops the gradient.

dppo (DPPO-Binary-TV, arXiv 2602.04879, with the quadratic penalty of Kimi K2.5, arXiv 2602.02276):
    -rho A, but 0 where A > 0 and p - p_mu > high, or A < 0 and p - p_mu < -low;  + tau log^2 rho everywhere
ppo_clip (arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729, the same bound
as the two-sided clip of arXiv 2505.07291):  -min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A
cispo (arXiv 2506.13585):  -sg(min(r, cap)) A logp
gspo (arXiv 2507.18071):  ppo_clip on s = the geometric mean of r over the rollout; each token carries 1/n
decoupled (arXiv 2505.24298):  sg(w) times ppo_clip with ratio = trainer
nll (supervised; mu is not used):  -A logp
Corrections by w (`_correct`), without gradient; none changes dppo's own penalty:
    tis      min(w, high)                        truncated importance sampling
    mask     w where w <= high, else 0           masked importance sampling
    icepop   w where low <= w <= high, else 0    the same on both sides (IcePop)
Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): a rollout with negative advantage is excluded
when the mean over its tokens of log(sampler / live policy) is above a bound.
KL(live || other) with d = live - other, of a token sampled by live (joschu.net/blog/kl-approx.html):
    k1  d                     unbiased, may be negative
    k2  d^2 / 2               biased, never negative; its gradient is that of the KL
    k3  exp(-d) - 1 + d       unbiased, never negative
Multiplied by the ratio of live policy and sampler, k1 and k3 estimate value and gradient without bias; k2
needs that ratio detached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from insitu.config.training import LossConfig
from insitu.errors import TrainError, user_code
from insitu.registry import find, shipped
from insitu.storage.files import sha256_of


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the loss of N tokens besides their live log-probability; all [N], no gradients."""

    mu: Tensor
    """The sampler's log-probability."""
    advantage: Tensor
    """Its rollout's."""
    prox: Tensor | None = None
    """The trainer's log-probability before the step's first update; None = equal to the live one."""
    ref: Tensor | None = None
    """The reference policy's log-probability."""
    live_mu: Tensor | None = None
    """Mean of live - mu over its rollout."""
    live_prox: Tensor | None = None
    """Mean of live - prox over its rollout; None with `prox` None = 0."""
    prox_mu: Tensor | None = None
    """log w of its rollout, at the correction's level."""

    def part(self, part: slice) -> LossInputs:
        """Return the inputs of some of the tokens."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        parts: dict[str, Any] = {name: None if t is None else t[part] for name, t in every.items()}
        return LossInputs(**parts)


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
    """[N] bool: the loss's own clip or mask bounds this token's gradient."""
    corrected: Tensor | None = None
    """[N] bool: a correction or off_policy_mask bounded or excluded this token; None without either."""
    kl: Tensor | None = None
    """[N] estimated KL from the reference, no gradient; None without a reference."""


def token_loss(logp: Tensor, terms: LossInputs, config: LossConfig) -> TokenLoss:
    """Return the loss of logp [N], which carries the gradient. Raises TrainError when an input is missing."""
    loss, cut = _policy_loss(logp, terms, config)
    loss, corrected = _corrected(loss, logp, terms, config)
    if config.loss == "dppo":
        loss = config.dppo_tau * (logp - terms.mu).square() + loss
    if config.kl == "none":
        return TokenLoss(loss, cut, corrected)
    kl = divergence(logp, _needed(terms.ref, "reference", config), config.kl)
    if config.kl_weight:
        term = kl
        if config.kl_unbiased:
            ratio = (logp - _old(logp, terms, config)).exp()
            # k2's gradient is right already: the ratio is only a weight
            term = kl * (ratio.detach() if config.kl == "k2" else ratio)
        loss = loss + config.kl_weight * term
    return TokenLoss(loss, cut, corrected, kl.detach())


def _policy_loss(logp: Tensor, terms: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the policy term of the configured loss and where its clip bounds the gradient, both [N]."""
    if not len(logp):
        # of a shared row all tokens may be other ranks'
        return logp * 0.0, torch.zeros_like(logp, dtype=torch.bool)
    with user_code(TrainError, f"loss {config.loss}", passing=torch.OutOfMemoryError):
        result = _loss_function(config.loss)(logp, terms, config)
    loss, cut = result if isinstance(result, tuple) else (result, torch.zeros_like(logp, dtype=torch.bool))
    if not isinstance(loss, Tensor) or loss.shape != logp.shape or cut.shape != logp.shape:
        raise TrainError(f"loss {config.loss} did not return a tensor of shape {list(logp.shape)}")
    if logp.requires_grad and not loss.requires_grad:
        raise TrainError(f"loss {config.loss} returned a tensor without a gradient: nothing would be learned")
    return loss, cut


@lru_cache(maxsize=16)
def _loss_function(name: str) -> LossFunction:
    found: LossFunction = find("losses", name)
    return found


def own_loss(name: str) -> str:
    """Return the hex SHA-256 of the file of a loss of the user's; empty for a built-in one."""
    if name in shipped("losses"):
        return ""
    found = _loss_function(name)
    module = getattr(found, "__module__", type(found).__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    return sha256_of(Path(file)) if file else ""


def _needed(tensor: Tensor | None, what: str, config: LossConfig) -> Tensor:
    if tensor is None:
        raise TrainError(f"loss {config.loss} needs the {what} log-probabilities")
    return tensor


def _prox(logp: Tensor, terms: LossInputs) -> Tensor:
    return logp.detach() if terms.prox is None else terms.prox


def _old(logp: Tensor, terms: LossInputs, config: LossConfig) -> Tensor:
    return _prox(logp, terms) if config.trainer_ratio else terms.mu


def _corrected(
    loss: Tensor, logp: Tensor, terms: LossInputs, config: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """Return the policy term after corrections, and where they bound it."""
    bounded: Tensor | None = None
    if config.correction != "none" or config.loss == "decoupled":
        log_w = _prox(logp, terms) - terms.mu
        if config.correction != "none" and config.correction_level != "token":
            log_w = _needed(terms.prox_mu, "trainer's own", config)
        factor, bounded = _correct(log_w, config)
        loss = loss * factor
    if config.off_policy_mask:
        live_mu = _needed(terms.live_mu, "sampler's", config)
        kept = (terms.advantage >= 0) | (-live_mu <= config.off_policy_mask)
        loss = torch.where(kept, loss, 0.0)
        bounded = ~kept if bounded is None else bounded | ~kept
    return loss, bounded


# --------------------------------------------------------------------------- policy terms


def nll(logp: Tensor, terms: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    return -terms.advantage * logp, torch.zeros_like(logp, dtype=torch.bool)


def dppo(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    moved = logp.detach().exp() - terms.mu.exp()
    a, (low, high) = terms.advantage, c.clips
    cut = ((a > 0) & (moved > high)) | ((a < 0) & (moved < -low))
    return -torch.where(cut, 0.0, (logp - terms.mu).exp() * a), cut


def ppo_clip(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    ratio = (logp - _old(logp, terms, c)).exp()
    return _clipped(ratio, terms.advantage, *c.clips, c.dual_clip)


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
    cap = 1.0 + c.clips[1]
    return -ratio.clamp(max=cap) * terms.advantage * logp, ratio > cap


def gspo(logp: Tensor, terms: LossInputs, c: LossConfig) -> tuple[Tensor, Tensor]:
    """Compute GSPO; the ratio of the rollout is a constant whose slope comes from each token's logp."""
    if not c.trainer_ratio:
        moved = _needed(terms.live_mu, "sampler's", c)
    elif terms.live_prox is None and terms.prox is None:
        moved = torch.zeros_like(logp)
    else:
        moved = _needed(terms.live_prox, "trainer's own", c)
    ratio = (moved + logp - logp.detach()).exp()
    return _clipped(ratio, terms.advantage, *c.clips, 0.0)


def divergence(live: Tensor, other: Tensor, kind: str) -> Tensor:
    """Return the estimate [N]; live [N] carries the gradient, other [N]."""
    d = live - other
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return (-d).expm1() + d
    raise TrainError(f"unknown KL estimator {kind!r}")


def _correct(log_w: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Map log_w [N] to (factor [N], bounded [N] bool: the correction changed w)."""
    w = log_w.exp()
    if config.correction == "none":
        return w, torch.zeros_like(w, dtype=torch.bool)
    lowest, highest = config.w_bounds
    out = w > highest
    if config.correction == "tis":
        return w.clamp(max=highest), out
    if config.correction == "icepop":
        out |= w < lowest
    return torch.where(out, 0.0, w), out
