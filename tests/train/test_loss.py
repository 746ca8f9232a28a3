"""Losses against slow, per-token references, with old != new."""

from __future__ import annotations

import math

import pytest
import torch

from whet.errors import ConfigError
from whet.train.loss import token_loss
from whet.train.options import LossConfig


def dppo(logp: float, mu: float, a: float) -> tuple[float, float]:
    """(loss, d loss / d logp), written from the paper's formula."""
    rho, p, q = math.exp(logp - mu), math.exp(logp), math.exp(mu)
    kept = not ((a > 0 and p - q > 0.2) or (a < 0 and p - q < -0.2))
    pull, slope = 1e-3 * (logp - mu) ** 2, 2e-3 * (logp - mu)
    return (pull - rho * a, slope - rho * a) if kept else (pull, slope)


def ppo(logp: float, mu: float, a: float, c: float) -> tuple[float, float]:
    rho = math.exp(logp - mu)
    clipped = min(max(rho, 0.8), 1.28)
    value, slope = min((rho * a, rho * a), (clipped * a, 0.0), key=lambda v: v[0])
    if c and a < 0 and value < c * a:
        value, slope = c * a, 0.0
    return -value, -slope


CASES = [
    (math.log(p), math.log(q), a)
    for p in (0.02, 0.15, 0.3, 0.55, 0.95)
    for q in (0.02, 0.16, 0.31, 0.5, 0.9)
    for a in (-1.5, -0.25, 0.5, 2.0)
]


@pytest.mark.parametrize("name", ["dppo", "ppo", "dual"])
def test_loss_and_gradient_equal_the_reference(name: str) -> None:
    logp = torch.tensor([c[0] for c in CASES], dtype=torch.float64, requires_grad=True)
    mu, a = (torch.tensor([c[i] for c in CASES], dtype=torch.float64) for i in (1, 2))
    config = {
        "dppo": LossConfig(),
        "ppo": LossConfig(name="ppo_clip"),
        "dual": LossConfig(name="ppo_clip", dual_clip=3.0),
    }[name]
    loss, cut = token_loss(logp, mu, a, config)
    loss.sum().backward()
    assert logp.grad is not None
    reference = [dppo(*c) if name == "dppo" else ppo(*c, 3.0 if name == "dual" else 0.0) for c in CASES]
    assert loss.tolist() == pytest.approx([r[0] for r in reference])
    assert logp.grad.tolist() == pytest.approx([r[1] for r in reference])
    assert 0 < int(cut.sum()) < len(CASES)


def test_the_ratio_binds_when_old_is_not_new() -> None:
    """The classic bug compares the policy with itself: then nothing is ever cut."""
    new, old = torch.log(torch.tensor([0.6])), torch.log(torch.tensor([0.3]))
    for config in (LossConfig(), LossConfig(name="ppo_clip")):
        assert token_loss(new, old, torch.ones(1), config)[1].item()
        assert not token_loss(new, new, torch.ones(1), config)[1].item()


def test_dual_clip_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="dual_clip"):
        LossConfig(dual_clip=0.5)


def test_nll_is_the_negative_log_probability_whatever_the_sampler_said() -> None:
    logp = torch.tensor([-0.5, -3.0], dtype=torch.float64, requires_grad=True)
    loss, cut = token_loss(logp, torch.zeros(2), torch.tensor([1.0, 1.0]), LossConfig(name="nll"))
    loss.sum().backward()
    assert logp.grad is not None
    assert (loss.tolist(), logp.grad.tolist()) == ([0.5, 3.0], [-1.0, -1.0])
    assert not cut.any()
