"""The Qwen3 architecture in plain torch: one set of weights for the embedded engine and the trainer.

Parameter names are those of `transformers.Qwen3ForCausalLM`, so checkpoints load there and in vLLM. The
forward is the trainer's; it uses no cache of the sampler. A prefix common to all rows is computed once,
gradients included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from insitu.errors import EngineError
from insitu_train.embedded.architecture import ModelConfig, read_architecture
from insitu_train.embedded.model_files import StoredModel, read_tensors

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Attention over one flat list of tokens; see `Qwen3.flat`."""


_OTHERS = ("rope_scaling", "no_rope_layers")
"""What only other families have."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def _rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [length, head_dim], in the half-split layout of Qwen3."""
    angles = rotary_angles(config, length)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def rotary_angles(config: ModelConfig, length: int) -> Tensor:
    """Return the angles [length, head_dim / 2] of positions, in float32 and rounded as transformers does."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turns = 1.0 / config.rope_theta**half
    if config.rope_scaling is not None:
        factor, low, high, positions = config.rope_scaling
        waves = 2 * math.pi / turns
        slow = torch.where(waves > positions / low, turns / factor, turns)
        share = (positions / waves - low) / (high - low)
        mixed = (1 - share) * slow / factor + share * slow
        turns = torch.where((waves >= positions / high) & (waves <= positions / low), mixed, slow)
    return torch.outer(torch.arange(length, dtype=torch.float32), turns)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [..., head_dim]; cos and sin broadcast against it."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, c.rms_norm_eps)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [..., T, d] to q [..., heads, T, hd], k and v [..., kv_heads, T, hd], rotated."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(-2, -3)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(-2, -3)
        v = self.v_proj(x).view(shape).transpose(-2, -3)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Body(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    @property
    def blocks(self) -> list[Layer]:
        """The layers in order, typed."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class Qwen3(nn.Module):
    """A Qwen3 causal language model, fp32, tied or untied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = _rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def soft_cap(self) -> float:
        return 0.0

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def device(self) -> torch.device:
        return self.cos.device

    def stored(self, *, whole: bool = False) -> StoredModel:
        """Return the files that `load_model` reads, also loadable by `Qwen3ForCausalLM.from_pretrained`."""
        tensors = {n: t.detach() for n, t in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            tensors.pop("lm_head.weight")
        shape = {name: value for name, value in asdict(self.config).items() if name not in _OTHERS}
        described = {
            **shape,
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "float32",
            # transformers 5 reads rope_theta from here, older versions and vLLM from the top level
            "rope_parameters": {"rope_type": "default", "rope_theta": self.config.rope_theta},
            "use_cache": True,
        }
        config = json.dumps(described, indent=2, sort_keys=True) + "\n"
        return StoredModel(name="model.safetensors", tensors=tensors, texts={"config.json": config})

    def read(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the parameters that `save` wrote, by name. Raises EngineError for another model."""
        held = load_model(folder)
        if held.config != self.config:
            raise EngineError(f"{folder} holds another model: {held.config}")
        return dict(held.named_parameters())

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the current weights by name, for a sampler to copy."""
        return dict(self.named_parameters())

    def hidden(self, prefix: Tensor, rows: Tensor) -> Tensor:
        """Return the final hidden states [B, T, d] of `rows`, each after the shared `prefix`, normalised.

        rows [B, T] (right-padded), prefix [P], P may be 0. Token t of a row has position P + t.
        """
        n_prefix, width = prefix.shape[0], rows.shape[1]
        cos, sin = self.cos[: n_prefix + width], self.sin[: n_prefix + width]
        blocks = self.model.blocks
        x = self.model.embed_tokens(rows)
        y = self.model.embed_tokens(prefix)
        seen = torch.ones(width, n_prefix + width, dtype=torch.bool).tril(n_prefix)
        for i, layer in enumerate(blocks):
            x, y = self._layer(layer, x, y, (cos, sin), seen, last=i == len(blocks) - 1)
        out: Tensor = self.model.norm(x)
        return out

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        y: Tensor,
        tables: tuple[Tensor, Tensor],
        seen: Tensor,
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """One block over the shared prefix y [P, d] and the rows x [B, T, d]."""
        (cos, sin), n_prefix, n_rows = tables, y.shape[0], x.shape[0]
        attn, gqa = layer.self_attn, layer.self_attn.heads != layer.self_attn.kv_heads
        q, k, v = attn.qkv(layer.input_layernorm(x), cos[n_prefix:], sin[n_prefix:])
        if n_prefix:
            pq, pk, pv = attn.qkv(layer.input_layernorm(y), cos[:n_prefix], sin[:n_prefix])
            k = torch.cat([pk.unsqueeze(0).expand(n_rows, -1, -1, -1), k], dim=2)
            v = torch.cat([pv.unsqueeze(0).expand(n_rows, -1, -1, -1), v], dim=2)
            if not last:
                mixed = F.scaled_dot_product_attention(
                    pq.unsqueeze(0),
                    pk.unsqueeze(0),
                    pv.unsqueeze(0),
                    is_causal=True,
                    enable_gqa=gqa,
                )
                y = y + attn.o_proj(mixed[0].transpose(0, 1).flatten(1))
                y = y + layer.mlp(layer.post_attention_layernorm(y))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)
        x = x + attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, y

    def flat(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the final hidden states [U, d] of a flat list of tokens (ids and positions [U]).

        `attend` applies the mask: attend(q [heads, U, hd], k and v [kv_heads, U, hd], scale) -> [heads, U,
        hd].
        """
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.model.embed_tokens(ids)
        for layer in self.model.blocks:
            attn = layer.self_attn
            q, k, v = attn.qkv(layer.input_layernorm(x), cos, sin)
            mixed = attend(q, k, v, attn.head_dim**-0.5)
            x = x + attn.o_proj(mixed.transpose(0, 1).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., d] to [..., vocab]."""
        out: Tensor = self.lm_head(hidden)
        return out


def initialise(config: ModelConfig, seed: int) -> Qwen3:
    """Return a new model: normal(0, 0.02) matrices, residual outputs scaled by 1/sqrt(2 layers)."""
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2:
                continue
            scale = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= (2 * config.num_hidden_layers) ** 0.5
            p.normal_(0.0, scale, generator=generator)
    return model


def save_model(model: Qwen3, folder: Path) -> None:
    """Write config.json and model.safetensors, loadable by `Qwen3ForCausalLM.from_pretrained`."""
    model.stored().write(folder)


def load_model(folder: Path) -> Qwen3:
    """Read a folder written by `save_model`. Raises EngineError when it does not fit."""
    config, tensors = read_architecture(folder), read_tensors(folder)
    if config.model_type != "qwen3":
        raise EngineError(
            f"{folder} holds a {config.model_type}: the built-in policy is a Qwen3;"
            ' policy.kind = "hf" trains others'
        )
    model = Qwen3(config)
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise EngineError(
            f"model {folder} does not fit its config.json in {len(wrong)} tensors, first {first}:"
            f" {found.get(first, 'missing')} where {wanted.get(first, 'nothing')} is expected"
        )
    model.load_state_dict(tensors)
    return model
