"""How much memory a training step will take, from the model's configuration alone.

peak = weights + optimiser's moments + gradients that are there before + what one pass holds at most

The last is found by a dry run of the training code (dry.py); the rest is arithmetic. A step's update needs
two temporary copies of the largest parameter, which counts where it is more. Used by fit.py and
`whet bench long`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from whet.train.attention.rows import EMULATED
from whet.train.memory.dry import DryHead, Load, Meter
from whet.train.memory.techniques import Techniques
from whet.train.options import Lora
from whet.train.policy.hf import HfPolicy, empty_model
from whet.train.policy.lora import add_lora

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Bytes of the device that a step takes."""

    states: int
    """Weights, moments, and gradients of earlier micro-batches."""
    activations: int
    """Most that the pass holds beside them, gradients of its own included."""
    update: int
    """Most that the update takes: states, gradients, temporary copies."""
    host: int
    """Bytes of the host's memory."""

    @property
    def peak(self) -> int:
        return max(self.states + self.activations, self.update)


class MemoryModel:
    """Predictions for one model, type, choice of what is trained, and kind of device."""

    def __init__(
        self, config: Any, *, dtype: torch.dtype, lora: Lora | None, kernels: Literal["cpu", "cuda"]
    ) -> None:
        """config: a `PretrainedConfig` of transformers."""
        model = empty_model(config)
        if lora is not None:
            add_lora(model, lora, dtype)
        self._policy = HfPolicy(model.train(), dtype=dtype, lora=lora)
        self._kernels = kernels
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        self._weights = sum(p.nbytes for p in parameters)
        self._trained = sum(p.nbytes for p in trained)
        self._largest = max(p.nbytes for p in trained)
        self._found: dict[tuple[Load, Techniques, bool], tuple[int, int]] = {}

    def predict(self, load: Load, techniques: Techniques, *, first: bool = True) -> Prediction:
        """first: no micro-batch of the step has left gradients before this one."""
        if techniques.tile_mlp >= load.tokens:
            techniques = replace(techniques, tile_mlp=0)
        key = (load, techniques, first)
        if key not in self._found:
            self._found[key] = self._dry_run(load, techniques, first)
        activations, parked = self._found[key]
        moments = 0 if techniques.offload_optimizer else 2 * self._trained
        # away from the device, one parameter's moments come for its update
        visiting = 2 * self._largest if techniques.offload_optimizer else 0
        return Prediction(
            states=self._weights + moments + (0 if first else self._trained),
            activations=activations,
            update=self._weights + moments + visiting + self._trained + 2 * self._largest,
            host=parked + 2 * self._trained - moments,
        )

    def _dry_run(self, load: Load, techniques: Techniques, first: bool) -> tuple[int, int]:
        """(bytes on the device, bytes parked on the host)."""
        policy, model = self._policy, self._policy.model
        for p in model.parameters():
            p.grad = None if first or not p.requires_grad else torch.empty_like(p)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        policy.techniques = techniques
        parked = policy.mode.offload.bytes
        before = EMULATED.set(self._kernels)
        try:
            with Meter([*model.parameters(), *model.buffers(), *grads]) as meter:
                self._pass(load)
        finally:
            EMULATED.reset(before)
            for p in model.parameters():
                p.grad = None
        return meter.peak, policy.mode.offload.bytes - parked

    def _pass(self, load: Load) -> None:
        policy = self._policy
        ids = torch.empty(load.rows, load.width, dtype=torch.int64, device="meta")
        prefix = torch.empty(load.prefix, dtype=torch.int64, device="meta")
        chosen = torch.empty(load.trained, dtype=torch.int64, device="meta")
        hidden = policy.hidden(prefix, ids).flatten(0, 1)[chosen]
        total: Any = DryHead.apply(hidden, policy.head_weight, self._kernels == "cuda")  # type: ignore[no-untyped-call]
        del hidden
        total.backward()
