"""What the trainer needs of a model: final hidden states, the head's matrix, named weights, a way to disk.

The embedded Qwen3 is one as it stands; hf.py makes one of a causal language model of transformers.
Hidden states are normalised, so `hidden @ head_weight.T` are the logits. Weights may be of a lower precision
in the forward than where they are kept; `named_parameters` are those that are kept. Used by
trainer/, sft/trainer.py and loss/fused_head.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn


class Attend(Protocol):
    """Attention over one flat list of U tokens: which token sees which is this object's to know."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [heads, U, head_dim], k and v [kv_heads, U, head_dim] -> [heads, U, head_dim]."""
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
        """[vocab, d] as it is kept; hidden states may be of a lower precision."""
        ...

    @property
    def device(self) -> torch.device:
        """Where hidden states are; rows may be handed over on the CPU."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of hidden states."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        ...

    def flat(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Of a flat list of tokens, ids and positions [U] int64, between which `attend` works: [U, d]."""
        ...

    def hidden(self, prefix: Tensor, rows: Tensor) -> Tensor:
        """Of `rows` [B, T] (right-padded) behind the shared `prefix` [P]: [B, T, d]. P may be 0."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under its name in a checkpoint; what needs no gradient is not trained."""
        ...

    def save(self, folder: Path) -> None:
        """Write config.json and what is trained as safetensors files: all weights, or the adapters."""
        ...

    def save_whole(self, folder: Path) -> None:
        """`save`, but all that an engine without adapters needs: adapters are added to their matrices."""
        ...

    def read(self, folder: Path) -> Mapping[str, Tensor]:
        """What `save` wrote, by the names of `named_parameters`. Raises InsituError if it is another
        model."""
        ...
