"""Causal attention of one row whose tokens are spread over ranks: context parallel.

A row of U tokens is cut into 2 x world chunks; rank r computes chunks r and 2 x world - 1 - r, so that all
have equally many pairs. In each layer keys and values of all chunks are gathered, and a rank attends with its
own queries; backward, their gradients are summed over ranks and scattered. U is filled up to equal chunks
behind its last token, which no other token sees.

    rank 0   |0|-----------|7|    rank 1   .|1|-------|6|.    rank 2   ..|2|---|5|..    rank 3   ...|3|4|...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from insitu.types import IntArray
from insitu_train.attention.rows import _attention, runs_on_gpu
from insitu_train.attention.tree import Piece, TreeAttend


class RowRanks(Protocol):
    """What the ranks of one row say to each other; each method is called by all."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def every(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of equal shapes, as [world, ...]."""
        ...

    def scatter_sums(self, parts: Tensor) -> Tensor:
        """Return the sum over ranks of `parts[own rank]` of [world, ...], which may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The first of `world` ranks without the others, on meta tensors: it allocates what they would send."""

    world: int
    rank: int = 0
    """Its chunks need most memory: the last one sees all keys."""

    def every(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.world, *tensor.shape))

    def scatter_sums(self, parts: Tensor) -> Tensor:
        return torch.empty_like(parts[0])


@dataclass(frozen=True, slots=True)
class RowSplit:
    """How the tokens of a row are spread over ranks."""

    tokens: int
    world: int

    @property
    def chunk(self) -> int:
        """Tokens of one chunk; a rank has two."""
        return -(-self.tokens // (2 * self.world))

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the numbers of a rank's chunks."""
        return rank, 2 * self.world - 1 - rank

    def positions(self, rank: int) -> IntArray:
        """Return the positions [2 x chunk] of a rank's tokens; those from `tokens` on are filling."""
        each = np.arange(self.chunk, dtype=np.int32)
        return np.concatenate([each + self.chunk * n for n in self.chunks(rank)])

    def join(self, parts: Tensor) -> Tensor:
        """Map the ranks' [world, heads, 2 x chunk, hd] to all tokens in order, [heads, all, hd]."""
        first = [part[:, : self.chunk] for part in parts]
        second = [part[:, self.chunk :] for part in parts]
        return torch.cat([*first, *reversed(second)], 1)

    def cut(self, joined: Tensor, parts: Tensor) -> None:
        """Copy what `join` makes to the ranks' `parts`, as they are there."""
        size = self.chunk
        for rank, part in enumerate(parts):
            for at, n in enumerate(self.chunks(rank)):
                part[:, at * size : (at + 1) * size] = joined[:, n * size : (n + 1) * size]


# Not torch's own: `experimental.context_parallel` rotates keys between the flash, efficient and cuDNN kernels
# of DTensors only, so it has none for a CPU; `distributed.nn` and `_functional_collectives` need a group that
# is registered in c10d, which replicas have not, and sum gradients in their own type.
class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, split: RowSplit, ranks: RowRanks) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        ctx.split, ctx.ranks = split, ranks
        found = ranks.every(torch.stack([k, v]))
        return split.join(found[:, 0]), split.join(found[:, 1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[no-untyped-def]
        split, ranks = ctx.split, ctx.ranks
        # float32: a sum of many terms in bfloat16 would lose digits
        size = (ranks.world, 2, dk.shape[0], 2 * split.chunk, dk.shape[2])
        parts = dk.new_empty(size, dtype=torch.float32)
        split.cut(dk, parts[:, 0])
        split.cut(dv, parts[:, 1])
        own = ranks.scatter_sums(parts)
        return own[0].to(dk.dtype), own[1].to(dv.dtype), None, None


@dataclass(frozen=True, slots=True)
class PartAttend:
    """Attention of one rank's tokens to those of all ranks; all call it, layer by layer."""

    split: RowSplit
    ranks: RowRanks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = _Gathered.apply(k, v, self.split, self.ranks)  # type: ignore[no-untyped-call]
        if not runs_on_gpu(q):
            return TreeAttend(self.pieces)(q, keys, values, scale)
        size, found = self.split.chunk, []
        for at, n in enumerate(self.split.chunks(self.ranks.rank)):
            end = (n + 1) * size
            seen = (keys[None, :, :end], values[None, :, :end])
            found.append(_attention(q[None, :, at * size : (at + 1) * size], *seen, scale)[0])
        return torch.cat(found, 1)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pairs of this rank: a CPU's kernel has no mask for queries that are the last of the keys."""
        size = self.split.chunk
        starts = [(at * size, n * size) for at, n in enumerate(self.split.chunks(self.ranks.rank))]
        own = [Piece(q, q + size, k, k + size, True) for q, k in starts]
        return (*own, *(Piece(q, q + size, 0, k, False) for q, k in starts if k))
