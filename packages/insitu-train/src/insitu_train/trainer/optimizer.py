"""AdamW and Muon under one learning-rate schedule, for RL and supervised training.

Muon orthogonalises the momentum of a weight matrix by Newton-Schulz iteration (Jordan et al., 2024,
kellerjordan.github.io/posts/muon), by `torch.optim.Muon`. It is used for hidden matrices; embeddings, head
and norms use AdamW.
AdamW calls `torch.optim.adamw.adamw`, so the bits equal those of `torch.optim.AdamW`: torch's optimizer
classes load torch's compiler (a second of CPU, some 80 MB).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from insitu.errors import ConfigError, TrainError
from insitu_train.model.base import Policy
from insitu_train.model.shard import like, whole
from insitu_train.options import OptimConfig, rate

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
            # one tensor at a time, so the order of float operations is fixed; on a CPU in one pass over each
            foreach=False,
            fused=all(p.is_cpu for p in moved),
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


class Optimiser:
    """AdamW, and Muon for hidden matrices if configured, with one schedule and one gradient clip."""

    def __init__(self, model: Policy, config: OptimConfig) -> None:
        self.config = config
        self.named: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        hidden = [n for n, p in self.named.items() if config.muon_lr and p.ndim == 2 and ".layers." in n]
        rest = [n for n in self.named if n not in set(hidden)]
        self._parked = False
        self.whole: Mapping[str, Tensor] | None = None
        """Sharded: the state, while it is gathered to be read."""
        if hidden and any(hasattr(p, "full_tensor") for p in self.named.values()):
            raise ConfigError("muon_lr: Muon needs whole matrices, and sharded ranks hold parts of them")
        adam = AdamW(
            [self.named[n] for n in rest], lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._parts: list[tuple[list[str], AdamW | torch.optim.Optimizer, float]] = [(rest, adam, config.lr)]
        if hidden:
            matrices = [self.named[n] for n in hidden]
            muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
            self._parts.append((hidden, muon, config.muon_lr))

    def clip(self) -> float:
        """Clip the gradients in place; return their global norm before, which may be nan or inf."""
        norm: Tensor = nn.utils.clip_grad_norm_(
            self.named.values(), self.config.grad_clip, error_if_nonfinite=False, foreach=False
        )
        return float(whole(norm))

    def update(self, step: int) -> float:
        """Apply the gradients as optimizer step `step` (from 0); return AdamW's learning rate."""
        factor = rate(self.config, step)
        for _, part, base in self._parts:
            part.param_groups[0]["lr"] = base * factor
            if self._parked:
                _step_parked(part)
            else:
                part.step()
        return self.config.lr * factor

    def park(self, away: bool = True) -> None:
        """Keep the moments in host memory, or on the device again.

        An update moves one parameter's moments at a time.
        """
        if away == self._parked:
            return
        self._parked = away
        for _, part, _ in self._parts:
            for parameter, state in part.state.items():
                _move(state, None if away else parameter.device)

    def zero(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as named tensors (`<parameter>/<moment>`), not copied; empty before any update."""
        state: dict[str, Tensor] = {}
        for names, part, _ in self._parts:
            for name in names:
                for key, value in part.state.get(self.named[name], {}).items():
                    state[f"{name}/{key}"] = value
        return state

    def readable(self) -> Mapping[str, Tensor]:
        """Return `tensors`, of sharded ranks as gathered."""
        return self.tensors() if self.whole is None else self.whole

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, by copy. Raises TrainError, changing nothing, if it does not fit."""
        moments: dict[str, dict[str, Tensor]] = {}
        for full, tensor in state.items():
            name, _, key = full.rpartition("/")
            if name not in self.named or tensor.shape not in (self.named[name].shape, torch.Size([])):
                raise TrainError(f"optimiser state {full} {list(tensor.shape)} belongs to another model")
            moments.setdefault(name, {})[key] = tensor
        for names, part, _ in self._parts:
            part.state.clear()
            for name in names:
                if name in moments:
                    part.state[self.named[name]] = {k: self._kept(name, t) for k, t in moments[name].items()}

    def _kept(self, name: str, moment: Tensor) -> Tensor:
        part = like(moment, self.named[name]) if moment.dim() else moment
        return part.to(self._home(name, moment), copy=True)

    def _home(self, name: str, moment: Tensor) -> torch.device:
        """Return the device of a moment; counters are on the host."""
        cpu = torch.device("cpu")
        return cpu if self._parked or moment.dim() == 0 else self.named[name].device


def _move(state: dict[str, Tensor], device: torch.device | None) -> None:
    """Move a parameter's moments to a device, None = the host; its step counter stays on the host."""
    for key, tensor in state.items():
        if tensor.dim() and device is not None:
            state[key] = tensor.to(device, non_blocking=True)
        elif tensor.is_cuda:
            # pinned, so that the copy back needs no second buffer
            state[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _step_parked(part: AdamW | torch.optim.Optimizer) -> None:
    """Call `part.step()` for one parameter at a time."""
    group = part.param_groups[0]
    parameters = group["params"]
    try:
        for p in parameters:
            group["params"] = [p]
            _move(part.state[p], p.device)
            part.step()
            _move(part.state[p], None)
    finally:
        group["params"] = parameters
