"""The engine's own copy of a model's weights, laid out for sampling.

Query, key and value matrices are fused, gate and up too. Within each query and key head the two rotary halves
are interleaved, so that a rotation is one complex product; scores are unchanged. The trainer may change its
parameters while the engine samples from the copy.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from insitu.errors import EngineError
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import rotary_angles
from insitu_train.embedded.model_files import digests

_PADDING = 16
"""Positions after the last one: a prompt is computed in whole tiles."""


class _NamedParameters(Protocol):
    """The part of a model that its checksum needs."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def checksum(model: _NamedParameters) -> str:
    """Return the hex SHA-256 over name, shape and digest of the fp32 bytes of all parameters."""
    return checksum_of(dict(model.named_parameters()))


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the `checksum` of parameters by name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return combined(shapes, digests(tensors, lambda tensor: tensor.to(torch.float32)))


def combined(shapes: Mapping[str, tuple[int, ...]], sums: Mapping[str, str]) -> str:
    """Return the `checksum` of parameters whose fp32 bytes have these digests."""
    h = hashlib.sha256()
    for name in sorted(shapes):
        h.update(f"{name}{shapes[name]}{sums[name]}".encode())
    return h.hexdigest()


ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether this torch offers products with prepacked weights, about twice as fast."""

BFLOAT16 = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether the CPU multiplies bfloat16 (AVX-512 or AMX)."""

_SMALL = 2**15
"""Entries of a matrix up to which a packed product is slower."""


class _PackedLinear:
    """x -> x W^T + b for copies of W and b, prepacked where that pays.

    A bfloat16 product is one of float32, rounded, where the CPU has no instructions for it.
    """

    __slots__ = ("_bias", "_packed", "_weight", "_widened")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._widened = weight.dtype == torch.bfloat16 and not BFLOAT16
        if self._widened:
            weight, bias = weight.float(), None if bias is None else bias.float()
        self._bias = None if bias is None else bias.clone()
        self._packed = ONEDNN and weight.numel() > _SMALL
        weight = weight.contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight.clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [M, in] to [M, out]."""
        if self._widened:
            return self._product(x.float()).to(torch.bfloat16)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return out


class _Named:
    """Tensors by name, each of the shape that the description gives it."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors, self.dtype, self._read = tensors, dtype, set[str]()

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """Return a tensor on the CPU, rounded to `dtype`, or None. Raises EngineError for another shape."""
        found = self._tensors.get(name)
        if found is None:
            return None
        if tuple(found.shape) != shape:
            raise EngineError(f"{name} has the shape {tuple(found.shape)} where config.json needs {shape}")
        self._read.add(name)
        return found.detach().to("cpu", self.dtype)

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor like `optional`. Raises EngineError also if it is missing."""
        found = self.optional(name, *shape)
        if found is None:
            raise EngineError(f"the model has no tensor {name}: a file is incomplete, or not of this model")
        return found

    def linear(self, name: str, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a linear layer."""
        return self.get(f"{name}.weight", rows, columns), self.optional(f"{name}.bias", rows)

    def factors(self, name: str, size: int) -> Tensor:
        """Return the factors [size] by which RMSNorm is x / hypot(|x|, sqrt(size * eps)), in float32."""
        return self.get(name, size).float() * math.sqrt(size)

    def gain(self, name: str, size: int) -> tuple[Tensor | None, Tensor]:
        """Return a norm's factors: of its result, if they are not folded, and of the next matrix."""
        found = self.factors(name, size)
        if self.dtype == torch.float32:
            return None, found
        return found, torch.ones((), dtype=self.dtype)

    def check_all_read(self) -> None:
        """Raise EngineError for a tensor without a place in the description: the model is another one."""
        left = sorted(name for name in self._tensors.keys() - self._read if not name.endswith("inv_freq"))
        if left:
            raise EngineError(f"{len(left)} tensors have no place in a model of this type, first {left[0]}")


class LayerWeights:
    """One layer, fused.

    `before` and `between` [d] are RMSNorm weights; None = they are folded into the next matrix. In bfloat16
    that would round other numbers than the trainer's.
    `qk_norm` [heads + kv_heads, head_dim]; None = heads are not normalised.
    """

    __slots__ = ("before", "between", "down", "gate_up", "out", "qk_norm", "qkv", "rotates")

    def __init__(self, c: ModelConfig, named: _Named, layer: int) -> None:
        at, d, wide = f"model.layers.{layer}.", c.hidden_size, c.intermediate_size
        heads, kv, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.rotates = c.rotates(layer)
        self.qk_norm = _qk_norm(c, named, f"{at}self_attn.")
        q, q_bias = named.linear(f"{at}self_attn.q_proj", heads * hd, d)
        k, k_bias = named.linear(f"{at}self_attn.k_proj", kv * hd, d)
        v, v_bias = named.linear(f"{at}self_attn.v_proj", kv * hd, d)
        self.before, gain = named.gain(f"{at}input_layernorm.weight", d)
        biases = [b if b is None else _interleaved(b, n) for b, n in ((q_bias, heads), (k_bias, kv))]
        fused = _fused([_halves(q, heads), _halves(k, kv), v], gain)
        self.qkv = _PackedLinear(fused, _joined([*biases, v_bias]))
        self.out = _PackedLinear(*named.linear(f"{at}self_attn.o_proj", d, heads * hd))
        self.between, gain = named.gain(f"{at}post_attention_layernorm.weight", d)
        gate, gate_bias = named.linear(f"{at}mlp.gate_proj", wide, d)
        up, up_bias = named.linear(f"{at}mlp.up_proj", wide, d)
        self.gate_up = _PackedLinear(_fused([gate, up], gain), _joined([gate_bias, up_bias]))
        self.down = _PackedLinear(*named.linear(f"{at}mlp.down_proj", d, wide))


def _fused(parts: Sequence[Tensor], gain: Tensor) -> Tensor:
    """Return matrices [.., in] as one, times `gain`, in a single pass: a publication waits for it."""
    sizes = [part.numel() // part.shape[-1] for part in parts]
    out = parts[0].new_empty(sum(sizes), parts[0].shape[-1])
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        torch.mul(part, gain, out=out[begin : begin + size].view(part.shape))
        begin += size
    return out


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return the biases of fused matrices as one. Raises EngineError where only some have one."""
    found = [bias for bias in biases if bias is not None]
    if found and len(found) < len(biases):
        raise EngineError("only some of the matrices that the engine fuses have a bias")
    return torch.cat(found) if found else None


def _interleaved(x: Tensor, heads: int) -> Tensor:
    """Return matrix rows or a bias with the rotary halves of each head interleaved."""
    return _halves(x, heads).flatten(0, 2)


def _halves(x: Tensor, heads: int) -> Tensor:
    return x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2)


def _qk_norm(c: ModelConfig, named: _Named, at: str) -> Tensor | None:
    hd = c.head_dim
    q = named.optional(f"{at}q_norm.weight", hd)
    k = named.optional(f"{at}k_norm.weight", hd)
    if (q is None or k is None) and (c.model_type == "qwen3" or q is not k):
        raise EngineError(f"the model has no tensor {at}{'q' if q is None else 'k'}_norm.weight")
    if q is None or k is None:
        return None
    both = torch.cat([q.expand(c.num_attention_heads, hd), k.expand(c.num_key_value_heads, hd)])
    return _interleaved(both.float().flatten() * hd**0.5, len(both)).view(both.shape)


class SamplerWeights:
    """All layers, embedding, final norm, head and rotary table of one policy version.

    `turns` [positions, 1, head_dim / 2] complex; `least` and `least_head` keep a norm from being 0; `last`
    [d] are factors of the final norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        length: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Copy the weights, by their names in a checkpoint, for `length` positions and products of `dtype`.

        Raises EngineError when they are not those of `config`.
        """
        c = self.config = config
        self.dtype = dtype
        self.layers: list[LayerWeights] = []
        self.embed = torch.empty(0, dtype=dtype)
        self.turns = _turns(c, length + _PADDING)
        self.least = torch.tensor((c.hidden_size * c.rms_norm_eps) ** 0.5)
        self.least_head = torch.tensor((c.head_dim * c.rms_norm_eps) ** 0.5)
        self.update(tensors)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy other weights of the same model, part by part into the memory of the old ones."""
        c, named = self.config, _Named(tensors, self.dtype)
        with torch.inference_mode():
            for layer in range(c.num_hidden_layers):
                del self.layers[layer : layer + 1]  # none where an update before has failed
                self.layers.insert(layer, LayerWeights(c, named, layer))
            embed = named.get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
            self.embed = self.embed.copy_(embed) if len(self.embed) else embed.clone()
            own = named.optional("lm_head.weight", c.vocab_size, c.hidden_size)
            if own is None and not c.tie_word_embeddings:
                raise EngineError("the model has no tensor lm_head.weight, and config.json does not tie it")
            self.head = _PackedLinear(embed if own is None or c.tie_word_embeddings else own)
            self.last = named.factors("model.norm.weight", c.hidden_size)
        named.check_all_read()

    def shortened(self, layers: int, length: int) -> SamplerWeights:
        """Return the same weights with the first layers only, for `length` positions."""
        short = copy.copy(self)
        short.layers, short.turns = self.layers[:layers], _turns(self.config, length)
        return short


def _turns(config: ModelConfig, length: int) -> Tensor:
    angles = rotary_angles(config, length)
    return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)
