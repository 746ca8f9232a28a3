"""Estimators of KL(live || other) from one log-probability each, of a token sampled by the live policy.

With d = live - other:

    k1  d                     unbiased, may be negative
    k2  d^2 / 2               biased, never negative; its gradient is that of the KL
    k3  exp(-d) - 1 + d       unbiased, never negative

(joschu.net/blog/kl-approx.html.) Multiplied by the ratio of live policy and sampler, k1 and k3 estimate value
and gradient of the KL without bias; k2 needs that ratio detached.
"""

from __future__ import annotations

from torch import Tensor

from insitu.errors import TrainError


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
