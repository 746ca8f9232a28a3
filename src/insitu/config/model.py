"""The table [policy]: implementation, precision and memory of the trained model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import CountOrZero, Table


class PolicyTable(Table):
    """The trained model."""

    kind: Literal["builtin", "hf"] = "builtin"
    """builtin = the package's Qwen3; hf = any causal language model of transformers, with engine.kind vllm or
    sglang."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """hf: device of the computation; auto = the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """hf: compute type; weights are stored in float32. auto = bfloat16 on a GPU, float32 on a CPU."""
    memory_gib: Annotated[float, Field(ge=0)] = 0.0
    """Device memory that training may use; 0 = all free memory, on a GPU when a step begins."""
    lora_rank: CountOrZero = 0
    """hf: rank of the adapters that are trained instead of the weights; 0 = all weights."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """hf with lora_rank: adapters are scaled by alpha / rank."""
    lora_targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """hf with lora_rank: last names of the matrices that get an adapter; [] = all of attention and MLP."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        for key, field in type(self).model_fields.items():
            if key == "kind" or self.__dict__[key] == field.default:
                continue
            if self.kind == "builtin":
                raise ValueError(f"{key} has no effect with kind = 'builtin', only with hf")
            if key in ("lora_alpha", "lora_targets") and not self.lora_rank:
                raise ValueError(f"{key} has no effect without lora_rank")
        return self
