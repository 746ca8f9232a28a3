"""The table [policy]: implementation, precision and memory of the trained model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from insitu.config.base import CountOrZero, Keys, Table, only, unless

_HF = only("kind", "hf")
_ADAPTED = only("kind", "hf", "tinker")
_LORA = unless("lora_rank", 0)


class PolicyKeys(Keys):
    """The trained model and its device."""

    kind: Literal["builtin", "hf", "tinker"] = "builtin"
    """builtin = the package's Qwen3; hf = any causal language model of transformers (engine.kind embedded:
    Llama, Qwen, Mistral, SmolLM); tinker = adapters at a training service, with engine.kind tinker."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _HF] = "auto"
    """Device of the computation; auto = the GPU if there is one."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _HF] = "auto"
    """Compute type; weights are stored in float32. auto = bfloat16 on a GPU, float32 on a CPU."""
    memory_gib: Annotated[float, Field(ge=0), _HF] = 0.0
    """Device memory that training may use; 0 = all free memory, on a GPU when a step begins."""


class PolicyTable(PolicyKeys, Table):
    """The trained model."""

    lora_rank: Annotated[CountOrZero, _ADAPTED] = 0
    """Rank of the adapters that are trained instead of the weights; 0 = all weights. tinker: must be set."""
    lora_alpha: Annotated[float, Field(gt=0), _HF, _LORA] = 32.0
    """Adapters are scaled by alpha / rank."""
    lora_targets: Annotated[tuple[str, ...], Field(strict=False), _HF, _LORA] = ()
    """Last names of the matrices that get an adapter; [] = all of attention and MLP."""
