"""AdamW without torch's optimizer classes, which load torch's compiler (a second of CPU, some 80 MB).

Calls `torch.optim.adamw.adamw`, so the bits equal `torch.optim.AdamW(foreach=False)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

_EPS = 1e-8
"""The default of `torch.optim.AdamW`."""


class AdamW:
    """AdamW over one group of parameters."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": lr}]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._betas, self._weight_decay = betas, weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        group = self.param_groups[0]
        moved = [p for p in group["params"] if p.grad is not None]
        states = [self._moments(p) for p in moved]
        adamw(
            moved,
            [p.grad for p in moved],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,  # one loop over tensors, so the order of float operations is fixed
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=self._weight_decay,
            eps=_EPS,
            maximize=False,
        )

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
