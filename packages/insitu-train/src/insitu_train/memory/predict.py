"""Predicts the memory of a training step from the model's configuration.

    peak = weights + optimizer moments + existing gradients + peak of one pass

The last is found by a dry run of the training code (meta_run.py). The update needs two temporary copies of
the largest parameter and counts where it is larger. A sharded rank holds its part of weights, moments and
gradients, and what it gathers (`gathered_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from insitu.errors import TrainError
from insitu_train.attention.parts import Alone, PartAttend, RowSplit
from insitu_train.attention.rows import EMULATED, emulated
from insitu_train.attention.tree import TreeAttend
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3
from insitu_train.memory.meta_run import (
    SHORT,
    BatchShape,
    DryHead,
    MemoryMeter,
    alike,
    head_pass,
    only,
    whole,
)
from insitu_train.model.base import Attend, MemoryOptions
from insitu_train.model.hf import HfPolicy, decoder_layers, empty_model
from insitu_train.model.lora import add_lora
from insitu_train.options import Lora

GIB = 1 << 30
Kernels = Literal["cpu", "cuda"]
"""Device whose kernels compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes that a step takes."""

    states: int
    """Weights, moments, and gradients of earlier micro-batches."""
    activations: int
    """Peak of the pass on top of them, its own gradients included."""
    update: int
    """Peak of the update: states, gradients, temporary copies."""
    host: int
    """Host memory."""

    @property
    def peak(self) -> int:
        return max(self.states + self.activations, self.update)


class MemoryPredictor:
    """Predicts for one model, dtype, set of trained parameters and kind of device."""

    def __init__(
        self,
        policy: HfPolicy | Qwen3,
        model: nn.Module,
        kernels: Kernels,
        *,
        shards: int = 1,
        buffers: int = 0,
    ) -> None:
        """Take the sizes of the parameters.

        model: holds the policy's parameters on the meta device. shards: ranks that hold a part each. buffers:
        bytes that a pass gathers on such a rank.
        """
        self._passing, self._kernels = policy, kernels
        self._shards, self._buffers = shards, buffers
        parameters = list(model.parameters())
        trained = [_part(p, shards) for p in parameters if p.requires_grad]
        self._weights = sum(_part(p, shards) for p in parameters)
        self._trained = sum(trained)
        self.held = self._weights + 2 * self._trained
        """Bytes of weights and moments."""
        self.parameters = sum(p.numel() for p in parameters)
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)
        self._largest = max(trained, default=0)
        self._found: dict[tuple[BatchShape, MemoryOptions, bool, bool], tuple[int, int]] = {}

    def predict(self, load: BatchShape, techniques: MemoryOptions, *, first: bool = True) -> MemoryPrediction:
        """Return the prediction. first: no earlier micro-batch of the step has left gradients.

        Raises TrainError when the model's code does not run on meta tensors.
        """
        if techniques.tile_mlp >= load.tokens:
            techniques = replace(techniques, tile_mlp=0)
        # a sharded rank's unreduced gradients are part of `_buffers`
        first = first and self._shards == 1
        key = (load, techniques, first, torch.is_grad_enabled())
        if key not in self._found:
            self._found[key] = self._dry_run(load, techniques, first)
        activations, offloaded = self._found[key]
        moments = 0 if techniques.offload_optimizer else 2 * self._trained
        # offloaded: the moments of one parameter are on the device during its update
        visiting = 2 * self._largest if techniques.offload_optimizer else 0
        return MemoryPrediction(
            states=self._weights + moments + (0 if first else self._trained),
            activations=activations + (self._buffers if torch.is_grad_enabled() else 0),
            update=self._weights + moments + visiting + self._trained + 2 * self._largest,
            host=offloaded + 2 * self._trained - moments,
        )

    def scoring(self, load: BatchShape, techniques: MemoryOptions) -> int:
        """Return the peak bytes of a forward pass without gradients, without the weights."""
        with torch.no_grad():
            return self.predict(load, replace(techniques, checkpoint=False)).activations

    def _dry_run(self, load: BatchShape, techniques: MemoryOptions, first: bool) -> tuple[int, int]:
        """Return (bytes on the device, bytes offloaded to the host)."""
        raise NotImplementedError

    @contextmanager
    def _metered(self, model: nn.Module, load: BatchShape, first: bool) -> Iterator[MemoryMeter]:
        """Yield what counts the bytes of a pass; the model has gradients meanwhile unless `first`."""
        for p in model.parameters():
            p.grad = None if first or not p.requires_grad else torch.empty_like(p)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        before = EMULATED.set(self._kernels)
        try:
            named = _by_name(load, self._kernels)
            yield MemoryMeter([*model.parameters(), *model.buffers(), *grads], named)
        finally:
            EMULATED.reset(before)
            for p in model.parameters():
                p.grad = None

    def _pass(self, load: BatchShape) -> None:
        policy = self._passing
        chosen = _numbers(load.trained)
        if load.tree is not None or load.parts > 1:
            attend = _attend(load)
            hidden = policy.flat(_numbers(load.tokens), _numbers(load.tokens), attend)[chosen]
        else:
            hidden = policy.hidden(_numbers(load.prefix), _numbers(load.rows, load.width))
            hidden = hidden.flatten(0, 1)[chosen]
        if not torch.is_grad_enabled():
            head_pass(hidden, policy.head_weight, self._kernels == "cuda")
            return
        total: Any = DryHead.apply(hidden, policy.head_weight, self._kernels == "cuda")  # type: ignore[no-untyped-call]
        del hidden
        total.backward()


class BuiltinMemory(MemoryPredictor):
    """Predicts for the built-in model, which has no memory techniques: float32 on a CPU."""

    def __init__(self, config: ModelConfig, *, frozen: bool = False) -> None:
        with torch.device("meta"):
            # shapes above the model's context are predicted too, as bounds for smaller ones
            self._model = Qwen3(replace(config, max_position_embeddings=1 << 24))
        self._model.requires_grad_(not frozen)
        super().__init__(self._model, self._model, "cpu")

    def _dry_run(self, load: BatchShape, techniques: MemoryOptions, first: bool) -> tuple[int, int]:
        with self._metered(self._model, load, first) as meter, _on_meta(), meter, torch.device("meta"):
            self._pass(load)
        return meter.peak, 0


# A dry run loads torch's compiler (a second of CPU, some 80 MB): it is skipped where this bound fits.
def at_most(config: ModelConfig, weights: int, load: BatchShape) -> int:
    """Return an upper bound of `BuiltinMemory` predictions for a pass and its update, over twice the peak.

    weights: bytes of the model's parameters.
    """
    tokens = load.tokens
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = tokens * (16 * config.hidden_size + 6 * config.intermediate_size + 8 * heads)
    scored = 4 * load.trained * (config.vocab_size + config.hidden_size)
    # a mask of all pairs of tokens
    pairs = 2 * (config.num_hidden_layers + 1) * tokens**2
    return (
        4 * (config.num_hidden_layers * layer + 8 * tokens * config.hidden_size + scored + pairs)
        + 9 * weights
    )


@contextmanager
def _on_meta() -> Iterator[None]:
    """Replace what a model calls of torch and meta tensors cannot do.

    Attention becomes the emulated kernel, which does not hold all scores.
    """
    torch_attention = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **given: Any) -> Tensor:
        if not q.is_meta:
            return torch_attention(q, k, v, attn_mask, *args, **given)
        return emulated(q, k, v, given.get("scale") or q.shape[-1] ** -0.5, attn_mask)

    # by name, not by a TorchFunctionMode: torch suspends those in a backward pass, where checkpoints run
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        with _Unpadded():
            yield
    finally:
        F.scaled_dot_product_attention = torch_attention


class _Unpadded(TorchFunctionMode):
    """The truth of a meta tensor is that of a mask without padding, and of positions of one sequence."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class MemoryModel(MemoryPredictor):
    """Predicts for a model of transformers."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        lora: Lora | None,
        kernels: Kernels,
        frozen: bool = False,
        shards: int = 1,
        attention: str = "",
    ) -> None:
        """Build the model on the meta device.

        config: a `PretrainedConfig`. attention: see `empty_model`. frozen: nothing is trained
        (trainer/reference.py). shards: ranks that hold a part each (model/shard.py). Raises TrainError when
        adapters do not fit.
        """
        model = empty_model(config, attention)
        if lora is not None:
            lora = add_lora(model, decoder_layers(model), lora, dtype)
        self._policy = HfPolicy(model.train(), dtype=dtype, lora=lora)
        if frozen:
            self._policy.freeze()
        buffers = _gathered_bytes(model, decoder_layers(model), dtype) if shards > 1 else 0
        super().__init__(self._policy, model, kernels, shards=shards, buffers=buffers)
        self._alike = alike(decoder_layers(model))

    def _dry_run(self, load: BatchShape, techniques: MemoryOptions, first: bool) -> tuple[int, int]:
        layers = decoder_layers(self._policy.model)
        try:
            if not self._alike:
                peaks, offloaded = self._run(load, techniques, first, len(layers))
                return max(peaks), offloaded
            return whole([self._run(load, techniques, first, n) for n in SHORT], len(layers))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            line = str(error).strip().partition("\n")[0]
            raise TrainError(
                f"{type(self._policy.model).__name__} does not run on meta tensors, so the memory"
                f" of a step cannot be predicted: {line}"
            ) from error

    def _run(
        self, load: BatchShape, techniques: MemoryOptions, first: bool, count: int
    ) -> tuple[Sequence[int], int]:
        """Return (peaks of the parts of a pass, bytes offloaded) with the first `count` layers."""
        policy, model = self._policy, self._policy.model
        policy.techniques = techniques
        offloaded = policy.mode.offload.bytes
        with (
            self._metered(model, load, first) as meter,
            only(decoder_layers(model), count, meter),
            _on_meta(),
            meter,
        ):
            self._pass(load)
        return meter.peaks, policy.mode.offload.bytes - offloaded


def _gathered_bytes(model: nn.Module, layers: Sequence[nn.Module], dtype: torch.dtype) -> int:
    """Return the peak bytes of a sharded rank for other ranks' parts and for gradients not yet reduced.

    Outside of layers, weights are whole from the forward to the end of the backward, and gradients twice
    while they are reduced. Of layers, in the compute dtype: the current and the next one, and the flat buffer
    that receives it; gradients in that dtype and in float32, of two layers.
    """
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    outside = sum(p.nbytes for p in rest) + 2 * sum(p.nbytes for p in rest if p.requires_grad)
    most = 0
    for layer in layers:
        weights = sum(p.numel() for p in layer.parameters())
        trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        most = max(most, 3 * weights * dtype.itemsize + trained * (dtype.itemsize + 2 * 4))
    return outside + most


def _part(p: Tensor, shards: int) -> int:
    """Return the bytes of the largest shard of a parameter that is cut along its first dimension."""
    return p.nbytes if shards == 1 else -(-p.shape[0] // shards) * p[0].numel() * p.element_size()


def _attend(load: BatchShape) -> Attend:
    """Return the attention of a flat layout on meta tensors."""
    if load.tree is not None:
        return TreeAttend(load.tree.pieces(load.tokens))
    return PartAttend(RowSplit(load.width, load.parts), Alone(load.parts))


def _by_name(load: BatchShape, kernels: Kernels) -> str:
    """Return the device whose attention kernels the pass calls by name, or empty."""
    return kernels if load.tree is not None or load.parts > 1 else ""


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
