"""How much memory a training step will take, from the model's configuration alone.

peak = weights + optimiser's moments + gradients that are there before + what one pass holds at most

The last is found by a dry run of the training code (dry.py); the rest is arithmetic. A step's update needs
two temporary copies of the largest parameter, which counts where it is more. A sharded rank has its part of
weights, moments and gradients, and what it gathers of the others' (`gathered_bytes`). Used by fit.py and
`python -m benchmarks long`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from insitu.engines.embedded.model import ModelConfig, Qwen3
from insitu.errors import TrainError
from insitu.training.attention.rows import EMULATED, emulated
from insitu.training.attention.tree import TreeAttend
from insitu.training.memory.layer_stack import SHORT, alike, only, whole
from insitu.training.memory.meta_run import BatchShape, DryHead, MemoryMeter, head_pass
from insitu.training.model.hf import HfPolicy, decoder_layers, empty_model
from insitu.training.model.lora import add_lora
from insitu.training.model.memory_options import MemoryOptions
from insitu.training.options import Lora

GIB = 1 << 30
Kernels = Literal["cpu", "cuda"]
"""Whose kernels compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
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


class MemoryPredictor:
    """Predictions for one model, type, choice of what is trained, and kind of device."""

    def __init__(
        self,
        policy: HfPolicy | Qwen3,
        model: nn.Module,
        kernels: Kernels,
        *,
        shards: int = 1,
        buffers: int = 0,
    ) -> None:
        """model: where the policy's parameters are, without content. shards: ranks that hold a part each.
        buffers: bytes that a pass gathers on such a rank."""
        self._passing, self._kernels = policy, kernels
        self._shards, self._buffers = shards, buffers
        parameters = list(model.parameters())
        trained = [_part(p, shards) for p in parameters if p.requires_grad]
        self._weights = sum(_part(p, shards) for p in parameters)
        self._trained = sum(trained)
        self._largest = max(trained, default=0)
        self._found: dict[tuple[BatchShape, MemoryOptions, bool, bool], tuple[int, int]] = {}

    def predict(self, load: BatchShape, techniques: MemoryOptions, *, first: bool = True) -> MemoryPrediction:
        """first: no micro-batch of the step has left gradients before this one. Raises TrainError when the
        model's code cannot be run without content."""
        if techniques.tile_mlp >= load.tokens:
            techniques = replace(techniques, tile_mlp=0)
        # A sharded rank's whole gradients are those of the units in hand, which `_buffers` has.
        first = first and self._shards == 1
        key = (load, techniques, first, torch.is_grad_enabled())
        if key not in self._found:
            self._found[key] = self._dry_run(load, techniques, first)
        activations, parked = self._found[key]
        moments = 0 if techniques.offload_optimizer else 2 * self._trained
        # away from the device, one parameter's moments come for its update
        visiting = 2 * self._largest if techniques.offload_optimizer else 0
        return MemoryPrediction(
            states=self._weights + moments + (0 if first else self._trained),
            activations=activations + (self._buffers if torch.is_grad_enabled() else 0),
            update=self._weights + moments + visiting + self._trained + 2 * self._largest,
            host=parked + 2 * self._trained - moments,
        )

    def scoring(self, load: BatchShape, techniques: MemoryOptions) -> int:
        """Most bytes that a forward pass without gradients holds beside the weights."""
        with torch.no_grad():
            return self.predict(load, replace(techniques, checkpoint=False)).activations

    def _dry_run(self, load: BatchShape, techniques: MemoryOptions, first: bool) -> tuple[int, int]:
        """(bytes on the device, bytes parked on the host)."""
        raise NotImplementedError

    def _pass(self, load: BatchShape) -> None:
        policy = self._passing
        chosen = _numbers(load.trained)
        if load.tree is not None:
            attend = TreeAttend(load.tree.pieces(load.tokens))
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
    """Of the built-in model, which knows no techniques: float32 on a CPU."""

    def __init__(self, config: ModelConfig, *, frozen: bool = False) -> None:
        with torch.device("meta"):
            # a load that is larger than the model's context may be asked for, to tell smaller ones by
            self._model = Qwen3(replace(config, max_position_embeddings=1 << 24))
        self._model.requires_grad_(not frozen)
        super().__init__(self._model, self._model, "cpu")

    def _dry_run(self, load: BatchShape, techniques: MemoryOptions, first: bool) -> tuple[int, int]:
        model = self._model
        for p in model.parameters():
            p.grad = None if first or not p.requires_grad else torch.empty_like(p)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        before = EMULATED.set(self._kernels)
        try:
            meter = MemoryMeter(
                [*model.parameters(), *model.buffers(), *grads], self._kernels if load.tree else ""
            )
            with _Attends(), meter, torch.device("meta"):
                self._pass(load)
        finally:
            EMULATED.reset(before)
            for p in model.parameters():
                p.grad = None
        return meter.peak, 0


def at_most(config: ModelConfig, weights: int, load: BatchShape) -> int:
    """Bytes that `BuiltinMemory` never predicts more than for a pass and its update, twice the peak and more.

    Where even they are there no dry run is needed, which loads torch's compiler: a second of CPU and some
    80 MB. weights: bytes of the model's parameters.
    """
    tokens = load.tokens
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = tokens * (16 * config.hidden_size + 6 * config.intermediate_size + 8 * heads)
    scored = 4 * load.trained * (config.vocab_size + config.hidden_size)
    # a mask has a number for each pair of tokens
    pairs = 2 * (config.num_hidden_layers + 1) * tokens**2
    return (
        4 * (config.num_hidden_layers * layer + 8 * tokens * config.hidden_size + scored + pairs)
        + 9 * weights
    )


class _Attends(TorchFunctionMode):
    """torch's attention of tensors without content is that of a CPU, not one that holds all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        return emulated(q, k, v, q.shape[-1] ** -0.5, kwargs.get("attn_mask"))


class MemoryModel(MemoryPredictor):
    """Of a model of transformers."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        lora: Lora | None,
        kernels: Kernels,
        frozen: bool = False,
        shards: int = 1,
    ) -> None:
        """config: a `PretrainedConfig` of transformers. frozen: nothing is trained (trainer/reference.py).
        shards: ranks that hold a part of the model each (model/shard.py). Raises TrainError when adapters do
        not fit it."""
        model = empty_model(config)
        if lora is not None:
            lora = add_lora(model, decoder_layers(model), lora, dtype)
        self._policy = HfPolicy(model.train(), dtype=dtype, lora=lora)
        if frozen:
            self._policy.freeze()
        buffers = gathered_bytes(model, decoder_layers(model), dtype) if shards > 1 else 0
        super().__init__(self._policy, model, kernels, shards=shards, buffers=buffers)
        self._alike = alike(decoder_layers(model))

    def _dry_run(self, load: BatchShape, techniques: MemoryOptions, first: bool) -> tuple[int, int]:
        layers = decoder_layers(self._policy.model)
        try:
            if not self._alike:
                peaks, parked = self._run(load, techniques, first, len(layers))
                return max(peaks), parked
            return whole([self._run(load, techniques, first, n) for n in SHORT], len(layers))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            line = str(error).strip().partition("\n")[0]
            raise TrainError(
                f"{type(self._policy.model).__name__} does not run on tensors without content, so the memory"
                f" of a step cannot be told beforehand: {line}"
            ) from error

    def _run(
        self, load: BatchShape, techniques: MemoryOptions, first: bool, count: int
    ) -> tuple[Sequence[int], int]:
        """(peaks of the parts of a pass, bytes parked on the host), with so many of the layers."""
        policy, model = self._policy, self._policy.model
        for p in model.parameters():
            p.grad = None if first or not p.requires_grad else torch.empty_like(p)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        policy.techniques = techniques
        parked = policy.mode.offload.bytes
        before = EMULATED.set(self._kernels)
        try:
            pieces = self._kernels if load.tree is not None else ""
            meter = MemoryMeter([*model.parameters(), *model.buffers(), *grads], pieces)
            with only(decoder_layers(model), count, meter), meter:
                self._pass(load)
        finally:
            EMULATED.reset(before)
            for p in model.parameters():
                p.grad = None
        return meter.peaks, policy.mode.offload.bytes - parked


def gathered_bytes(model: nn.Module, layers: Sequence[nn.Module], dtype: torch.dtype) -> int:
    """What a sharded rank holds of other ranks' parts at most in a pass, and of gradients not yet cut apart.

    What lies outside of layers is whole from the forward to the end of the backward, and its gradients are,
    twice while they are added up. Of layers, in the compute type: the one that runs and the next, and the
    flat buffer in which that one arrives; gradients in that type, and in float32 those that are added up, of
    two layers.
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
    """Bytes of the largest part of a parameter that is cut along its first dimension."""
    return p.nbytes if shards == 1 else -(-p.shape[0] // shards) * p[0].numel() * p.element_size()


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
