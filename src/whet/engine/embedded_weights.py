"""The engine's own copy of a model's weights, laid out for sampling.

Query, key and value matrices are fused, gate and up too. Within each query and key head the two rotary
halves are interleaved, so that a rotation is one complex product; scores do not change by it. The copy is
taken at `take`, so a trainer may go on changing its parameters while the engine samples.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from whet.engine.embedded_model import Layer, Qwen3


def checksum(model: Qwen3) -> str:
    """Hex SHA-256 over name, shape and fp32 bytes of every parameter in name order (a tied head once)."""
    h = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        flat = tensor.detach().to(torch.float32).contiguous()
        h.update(f"{name}{tuple(flat.shape)}".encode())
        h.update(flat.numpy().data)
    return h.hexdigest()


class LayerWeights:
    """One layer, fused. `qk_norm` [heads + kv_heads, head_dim] carries the score scale in its query part."""

    __slots__ = ("down", "gate_up", "in_norm", "mlp_norm", "out", "qk_norm", "qkv")

    def __init__(self, layer: Layer, order: Tensor) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        heads, kv_heads, hd = attn.heads, attn.kv_heads, attn.head_dim

        def interleaved(weight: Tensor, n: int) -> Tensor:
            return weight.view(n, hd, -1)[:, order].flatten(0, 1)

        q, k = interleaved(attn.q_proj.weight, heads), interleaved(attn.k_proj.weight, kv_heads)
        self.qkv = torch.cat([q, k, attn.v_proj.weight]).contiguous()
        q_norm = attn.q_norm.weight[order] * hd**-0.5
        self.qk_norm = torch.cat(
            [q_norm.expand(heads, hd), attn.k_norm.weight[order].expand(kv_heads, hd)]
        ).contiguous()
        self.out = attn.o_proj.weight.clone()
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).contiguous()
        self.down = mlp.down_proj.weight.clone()
        self.in_norm = layer.input_layernorm.weight.clone()
        self.mlp_norm = layer.post_attention_layernorm.weight.clone()


class Weights:
    """All layers, embedding, final norm, head and rotary table of one policy version."""

    def __init__(self, model: Qwen3) -> None:
        c = model.config
        self.config = c
        half = c.head_dim // 2
        order = torch.arange(c.head_dim).view(2, half).t().reshape(-1)
        with torch.inference_mode():
            self.layers = [LayerWeights(layer, order) for layer in model.model.blocks]
            self.embed = model.model.embed_tokens.weight.clone()
            self.norm = model.model.norm.weight.clone()
            self.head = self.embed if c.tie_word_embeddings else model.lm_head.weight.clone()
            self.turns = torch.complex(model.cos[:, :half], model.sin[:, :half]).unsqueeze(1).contiguous()
        """[positions, 1, head_dim / 2] complex."""
