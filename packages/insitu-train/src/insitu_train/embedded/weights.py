"""The engine's own copy of a model's weights, laid out for sampling.

Query, key and value matrices are fused, gate and up too. Within each query and key head the two rotary halves
are interleaved, so that a rotation is one complex product; scores are unchanged. The trainer may change its
parameters while the engine samples from the copy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from insitu_train.embedded.model import Layer, Qwen3, RMSNorm
from insitu_train.embedded.model_files import digests

_IDLE = 129
"""Positions after the last one, for idle rows."""


class _NamedParameters(Protocol):
    """The part of a model that its checksum needs."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def checksum(model: _NamedParameters) -> str:
    """Return the hex SHA-256 over name, shape and digest of the fp32 bytes of all parameters."""
    return checksum_of(dict(model.named_parameters()))


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the `checksum` of parameters by name."""
    h = hashlib.sha256()
    for name, found in digests(tensors, lambda tensor: tensor.to(torch.float32)).items():
        h.update(f"{name}{tuple(tensors[name].shape)}{found}".encode())
    return h.hexdigest()


ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether this torch offers products with prepacked weights, about twice as fast."""

_SMALL = 2**15
"""Entries of a matrix up to which a packed product is slower."""


class _PackedLinear:
    """x -> x W^T for a copy of W, prepacked where that pays."""

    __slots__ = ("_packed", "_weight")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.clone(memory_format=torch.contiguous_format)
        self._packed = ONEDNN and weight.numel() > _SMALL
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [M, in] to [M, out]."""
        if not self._packed:
            return F.linear(x, self._weight)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, None, "none", [], "")
        return out


class LayerWeights:
    """One layer, fused; RMSNorm weights are folded into the following matrix.

    `qk_norm` [heads + kv_heads, head_dim] includes the score scale in its query part.
    """

    __slots__ = ("down", "gate_up", "out", "qk_norm", "qkv")

    def __init__(self, layer: Layer, order: Tensor) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        heads, kv_heads, hd = attn.heads, attn.kv_heads, attn.head_dim

        def interleaved(weight: Tensor, n: int) -> Tensor:
            return weight.view(n, hd, -1)[:, order].flatten(0, 1)

        q, k = interleaved(attn.q_proj.weight, heads), interleaved(attn.k_proj.weight, kv_heads)
        self.qkv = _PackedLinear(torch.cat([q, k, attn.v_proj.weight]) * _gain(layer.input_layernorm))
        q_norm = attn.q_norm.weight[order]
        k_norm = attn.k_norm.weight[order] * hd**0.5
        self.qk_norm = torch.cat([q_norm.expand(heads, hd), k_norm.expand(kv_heads, hd)]).contiguous()
        self.out = _PackedLinear(attn.o_proj.weight)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.gate_up = _PackedLinear(gate_up * _gain(layer.post_attention_layernorm))
        self.down = _PackedLinear(mlp.down_proj.weight)


def _gain(norm: RMSNorm) -> Tensor:
    """Return the factor by which RMSNorm is x / hypot(|x|, sqrt(size * eps))."""
    return norm.weight * math.sqrt(norm.weight.shape[0])


class SamplerWeights:
    """All layers, embedding, final norm, head and rotary table of one policy version."""

    def __init__(self, model: Qwen3) -> None:
        c = model.config
        self.config = c
        half = c.head_dim // 2
        order = torch.arange(c.head_dim).view(2, half).t().reshape(-1)
        with torch.inference_mode():
            self.layers = [LayerWeights(layer, order) for layer in model.model.blocks]
            self.embed = model.model.embed_tokens.weight.clone()
            self.head = _PackedLinear(model.lm_head.weight * _gain(model.model.norm))
            turns = torch.complex(model.cos[:, :half], model.sin[:, :half])
            self.turns = torch.cat([turns, turns[:1].expand(_IDLE, half)]).unsqueeze(1)
            self.least = torch.tensor((c.hidden_size * c.rms_norm_eps) ** 0.5)
            self.least_head = torch.tensor((c.head_dim * c.rms_norm_eps) ** 0.5)
        """`turns` [positions, 1, head_dim / 2] complex; `least` and `least_head` keep a norm from being 0."""
