"""What a GGUF file calls the architectures, tensors and settings that a model folder names otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture that both sides have."""

    model_class: str
    """Entry of `architectures` in config.json."""
    permuted: bool = False
    """llama.cpp keeps the two halves of each rotary pair of q and k side by side."""
    biases: bool = False
    """q, k and v have biases."""
    head_norms: bool = False
    """q and k are normalised in each head."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(model_class="LlamaForCausalLM", permuted=True),
    "qwen2": Family(model_class="Qwen2ForCausalLM", biases=True),
    "qwen3": Family(model_class="Qwen3ForCausalLM", head_norms=True),
}
"""By `general.architecture`, which is `model_type` in config.json too; Mistral is a `llama`."""

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASED, _HEAD_NORMS = ("attn_q", "attn_k", "attn_v"), ("attn_q_norm", "attn_k_norm")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def layer_tensors(family: Family, layers: int) -> dict[str, str]:
    """Return the names of all tensors but those of `TOP`: in a folder, by those in a GGUF file."""
    found = {}
    for layer in range(layers):
        for part, name in PARTS.items():
            if part in _HEAD_NORMS and not family.head_norms:
                continue
            for kind in ("weight", "bias") if family.biases and part in _BIASED else ("weight",):
                found[f"blk.{layer}.{part}.{kind}"] = f"model.layers.{layer}.{name}.{kind}"
    return found


def rotary_heads(name: str, heads: int, kv_heads: int) -> int:
    """Return the heads of a tensor, by its GGUF name, whose rows llama.cpp orders otherwise; 0 = none."""
    found = _LAYER.fullmatch(name)
    return {"attn_q.weight": heads, "attn_k.weight": kv_heads}.get(found[2], 0) if found else 0


def halves_apart(matrix: Matrix, heads: int) -> Matrix:
    """Return rows as a folder has them: in each head first the one, then the other half of all pairs."""
    rows = matrix.reshape(heads, -1, 2, matrix.shape[-1])
    return rows.swapaxes(1, 2).reshape(matrix.shape)


def halves_paired(matrix: Matrix, heads: int) -> Matrix:
    """Undo `halves_apart`."""
    rows = matrix.reshape(heads, 2, -1, matrix.shape[-1])
    return rows.swapaxes(1, 2).reshape(matrix.shape)


ROPE_DIVISORS = "rope_freqs.weight"
"""What Llama 3 divides its rotary frequencies by."""


def llama3_divisors(
    theta: float, width: int, factor: float, original: int, low: float = 1.0, high: float = 4.0
) -> npt.NDArray[np.float32]:
    """Return the content of `ROPE_DIVISORS` [width / 2] for the settings of config.json."""
    waves = 2 * np.pi * theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
