"""How far a result in float32 may be from the exact one: from the computation, not from one machine.

A sum of n products, computed in any order, is the exact sum of inputs that are each off by at most n units of
rounding (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). So the weights of an exact model are
moved by that much, at random, and what the result then moves by is what rounding may do to it: the kernels of
a CPU (AVX-512, AVX2, neither) differ in the order of their sums only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch

from insitu_train.embedded.model import Qwen3

UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""
SUM = 64
"""No less than the longest sum in train_lab's model: 48 columns of an MLP, 50 logits, some 30 keys."""
DRAWS = 4

Named = Mapping[str, torch.Tensor]
Evaluate = Callable[..., tuple[float, Named]]
"""Loss and gradients of models in float64."""


def shaken(model: Qwen3, seed: int) -> Qwen3:
    """A copy in float64, every weight moved by SUM units of rounding up or down."""
    moved = deepcopy(model).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + SUM * UNIT * torch.randint(-1, 2, p.shape, generator=generator))
    return moved


def rounding(evaluate: Evaluate, *models: Qwen3) -> tuple[float, dict[str, float]]:
    """What rounding may do to the loss, and to each gradient relative to its largest entry."""
    exact_loss, exact = evaluate(*(deepcopy(m).double() for m in models))
    assert {g.dtype for g in exact.values()} == {torch.float64}
    loss, far = 0.0, dict.fromkeys(exact, 0.0)
    for draw in range(DRAWS):
        found_loss, found = evaluate(*(shaken(m, draw * len(models) + i) for i, m in enumerate(models)))
        loss = max(loss, abs(found_loss - exact_loss))
        for name, gradient in found.items():
            far[name] = max(far[name], apart(gradient, exact[name]))
    return loss, far


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference of two tensors, relative to the largest entry of the second."""
    return float((found - exact).abs().max() / exact.abs().max())
