"""The model interface of the trainer: final hidden states, head matrix, named weights, load and save.

The embedded Qwen3 implements it; hf.py wraps a causal language model of transformers. Hidden states are
normalised, so `hidden @ head_weight.T` are the logits. The forward may compute in lower precision than the
stored `named_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from insitu_train.embedded.model_files import StoredModel


class Attend(Protocol):
    """Attention over one flat list of U tokens; the object defines the mask."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Map q [heads, U, head_dim] and k, v [kv_heads, U, head_dim] to [heads, U, head_dim]."""
        ...


class Policy(Protocol):
    """A causal language model under training."""

    @property
    def max_positions(self) -> int:
        """Most tokens of one row."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def head_weight(self) -> Tensor:
        """[vocab, d] as stored; hidden states may have lower precision."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of hidden states; rows may be passed on the CPU."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        ...

    @property
    def soft_cap(self) -> float:
        """Cap c of logits: they are c * tanh(hidden @ head / c); 0 = none."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        ...

    def flat(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states [U, d] of a flat list of tokens; ids and positions [U] int64."""
        ...

    def hidden(self, prefix: Tensor, rows: Tensor) -> Tensor:
        """Return hidden states [B, T, d] of right-padded `rows` [B, T] after the shared `prefix` [P].

        P may be 0.
        """
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, by its checkpoint name; frozen ones have no requires_grad."""
        ...

    def stored(self, *, whole: bool = False) -> StoredModel:
        """Return config.json and the trained weights as files: all of them, or the adapters.

        whole: the whole model, adapters merged.
        """
        ...

    def read(self, folder: Path) -> Mapping[str, Tensor]:
        """Return what `stored` wrote, by parameter name. Raises InsituError for another model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Memory techniques; all off by default."""

    checkpoint: bool = False
    """Keep only the layers' inputs; recompute layers in the backward pass."""
    save_attention: bool = False
    """With checkpoint: keep attention's output too."""
    tile_mlp: int = 0
    """Tokens of an MLP computed at once; 0 = all."""
    offload_activations: bool = False
    """With checkpoint: keep the layers' inputs in host memory."""
    offload_optimizer: bool = False
    """Keep optimizer moments in host memory between updates."""

    def __str__(self) -> str:
        names = [f.name for f in fields(self) if getattr(self, f.name)]
        return " + ".join(names) or "plain"


PLAIN = MemoryOptions()
