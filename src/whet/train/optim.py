"""Optimisers and learning-rate schedule, shared by the RL trainer and supervised training.

Muon orthogonalises the momentum of a weight matrix by Newton-Schulz iteration (Jordan et al., 2024,
kellerjordan.github.io/posts/muon); the implementation is `torch.optim.Muon`. It serves the hidden matrices
only: embeddings, head and norms keep AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from whet.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How weights move."""

    lr: float = 2e-4
    """AdamW's learning rate at the top of the schedule."""
    muon_lr: float = 0.0
    """Muon's learning rate for hidden matrices; 0 = AdamW for everything."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    warmup_steps: int = 0
    """Steps of linear warm-up; step k of n runs at k/n of the rate."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0
    """Steps until the decay ends; needed unless constant."""
    final: float = 0.0
    """Share of the rate that is left when the decay has ended."""

    def __post_init__(self) -> None:
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(f"decay={self.decay} needs total_steps > warmup_steps")


def rate(config: OptimConfig, step: int) -> float:
    """Factor on the learning rates at optimiser step `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final + (1.0 - config.final) * left


class Optimiser:
    """AdamW, and Muon for hidden matrices when configured, under one schedule and one gradient clip."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.named = dict(model.named_parameters())
        hidden = {
            n for n, p in self.named.items() if config.muon_lr and p.ndim == 2 and ".layers." in f".{n}"
        }
        rest = [p for n, p in self.named.items() if n not in hidden]
        # foreach=False: one loop over tensors, so the order of float operations is fixed.
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, foreach=False
            )
        ]
        if hidden:
            matrices = [self.named[n] for n in self.named if n in hidden]
            self.parts.append(torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay))
        self._base = [part.param_groups[0]["lr"] for part in self.parts]

    def clip(self) -> float:
        """Clip the gradients in place; returns their global norm before. May be nan or inf."""
        norm: Tensor = nn.utils.clip_grad_norm_(
            self.named.values(), self.config.grad_clip, error_if_nonfinite=False, foreach=False
        )
        return float(norm)

    def update(self, step: int) -> float:
        """Apply the gradients as optimiser step `step` (from 0). Returns AdamW's learning rate."""
        factor = rate(self.config, step)
        for part, base in zip(self.parts, self._base, strict=True):
            part.param_groups[0]["lr"] = base * factor
            part.step()
        return self.config.lr * factor

    def zero(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)
