"""Attention over a prefix tree by flex_attention, for GPUs and trees with many short branches.

Visibility is an interval: token q sees k <= q while q < last[k], the end of the subtree of k's node. So each
block's smallest and largest `last` determine which blocks of the mask are empty, partial or full; the mask
itself is never built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from insitu_train.plan.prefix_tree import Tree

BLOCK = 128


@cache
def _compiled() -> Callable[..., Any]:
    """Return the kernel, compiled once for all shapes."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask(tree: Tree, device: torch.device) -> BlockMask:
    """Return the tree's visibility by blocks of queries and keys."""
    last = torch.from_numpy(np.asarray(tree.end)[tree.node].astype(np.int64)).to(device)
    count = -(-tree.tokens // BLOCK)
    padded = torch.full((count * BLOCK,), tree.tokens, device=device)
    padded[: tree.tokens] = last
    low, high = (getattr(padded.view(count, BLOCK), name)(1) for name in ("amin", "amax"))
    first = torch.arange(count, device=device) * BLOCK
    behind = first[:, None] > first[None]
    full = behind & (low[None] >= (first[:, None] + BLOCK).clamp(max=tree.tokens))
    partial = (behind & (high[None] > first[:, None]) & ~full) | torch.eye(
        count, dtype=torch.bool, device=device
    )

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < padded[k])

    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tree.tokens, tree.tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Map [Q, K] bool to the number of blocks of each query block and their indices, first ones first.

    Shapes [1, 1, Q] and [1, 1, Q, K].
    """
    found = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], found.int()[None, None]


@dataclass(frozen=True, slots=True)
class FlexAttend:
    """Attention between the tokens of one tree."""

    mask: BlockMask

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> FlexAttend:
        return cls(block_mask(tree, device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        run: Any = _compiled() if q.is_cuda else flex_attention
        out: Tensor = run(
            q[None],
            k[None],
            v[None],
            block_mask=self.mask,
            scale=scale,
            enable_gqa=q.shape[0] != k.shape[0],
        )
        return out[0]
