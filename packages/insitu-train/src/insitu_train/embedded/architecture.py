"""What the embedded engine needs to know of a model, read from its config.json. No torch.

One description serves all families: they differ in whether heads are normalised, which matrices have a bias
(both known from the names of tensors), the rotary frequencies, and the layers without rotation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.errors import EngineError, boundary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type` of the configurations that the engine runs; SmolLM2 is a llama."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of Llama 3's scaled frequencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a model, in the field names of its config.json."""

    vocab_size: int
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    model_type: str = "qwen3"
    rope_scaling: tuple[float, float, float, float] | None = None
    """Values of Llama 3's scaling: factor, low and high frequency factor, original positions."""
    no_rope_layers: tuple[int, ...] = ()
    """1 for each layer that rotates, 0 for one that does not; empty = all rotate."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the description of a config.json. Raises EngineError for what the engine does not run."""
        heads = int(raw["num_attention_heads"])
        rope, scaling = _rope(raw)
        if trouble := _trouble(raw, rope):
            raise EngineError(
                f"{trouble}: the embedded engine runs {', '.join(FAMILIES)} (SmolLM2 is a llama) with full"
                ' attention; engine.kind = "vllm" runs others'
            )
        layers = int(raw["num_hidden_layers"])
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            intermediate_size=int(raw["intermediate_size"]),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=int(raw.get("max_position_embeddings") or 2048),
            # transformers leaves out what its class has by default
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", raw["model_type"] == "smollm3")),
            model_type=str(raw["model_type"]),
            rope_scaling=scaling,
            no_rope_layers=_rotating(raw, layers),
        )

    @property
    def token_values(self) -> int:
        """Numbers that keys and values of one token are."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def rotates(self, layer: int) -> bool:
        return not self.no_rope_layers or bool(self.no_rope_layers[layer])


def read_architecture(folder: Path) -> ModelConfig:
    """Return the description of a model folder. Raises EngineError."""
    with boundary(EngineError, f"load model {folder}"):
        raw = json.loads((folder / "config.json").read_bytes())
        try:
            return ModelConfig.of(raw)
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json: {error}") from error


def _rope(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[float, float, float, float] | None]:
    """Return the rotary parameters, of either generation of transformers, and Llama 3's scaling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if _rope_type(rope) != "llama3":
        return rope, None
    factor, low, high, positions = (float(rope[key]) for key in _SCALING)
    return rope, (factor, low, high, positions)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rotating(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return SmolLM3's list of layers that rotate; empty where all do."""
    if raw["model_type"] != "smollm3":
        return ()
    interval = int(raw.get("no_rope_layer_interval") or 4)
    usual = [int((layer + 1) % interval != 0) for layer in range(layers)]
    found = tuple(int(flag) for flag in raw.get("no_rope_layers") or usual)
    return () if all(found) else found


def _trouble(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> str:
    """Return what of a configuration the engine does not run, or empty."""
    kind = str(raw.get("model_type"))
    if kind not in FAMILIES:
        return f"a model of type {kind}"
    # Qwen2, Qwen3 and SmolLM3 may name a window that they do not use
    windowed = kind == "mistral" or raw.get("use_sliding_window")
    named = {
        f"a sliding window of {raw.get('sliding_window')}": windowed and raw.get("sliding_window"),
        "sliding-window layers": "sliding_attention" in (raw.get("layer_types") or ()),
        f"rotary positions of type {_rope_type(rope)}": _rope_type(rope) not in ("default", "llama3"),
        "partial rotary positions": float(rope.get("partial_rotary_factor") or 1.0) != 1.0,
        f"the activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
        "quantized weights": raw.get("quantization_config") is not None,
    }
    return next((what for what, wrong in named.items() if wrong), "")
