"""The forward pass of a micro-batch: what predicts its trained tokens. Called by trainer.py, reference.py;
memory/plan.py asks how."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from insitu.training.attention.tree import Piece, TreeAttend, tree_pieces
from insitu.training.loss.fused_head import chosen
from insitu.training.model.base import Attend, Policy
from insitu.training.plan.prefix_tree import Tree
from insitu.training.trainer.batch import Padded, TensorBatch
from insitu.types import IntArray

LONG = 512
"""Queries of a mean piece from which flash kernels piece by piece are used on a GPU, not flex_attention."""


def states(model: Policy, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """(hidden states [N, d] that predict the batch's trained tokens, row by row; those tokens [N] int64)."""
    if isinstance(batch.layout, Padded):
        hidden, targets, _ = chosen(model, batch.layout.prefix, batch.layout.ids, batch.layout.mask)
        return hidden, targets
    tree = batch.layout
    hidden = model.flat(_index(tree.ids), _index(tree.positions), tree_attend(tree, model))
    return hidden[_index(tree.at).to(hidden.device)], _index(tree.target).to(hidden.device)


def tree_attend(tree: Tree, model: Policy) -> Attend:
    """How this tree is attended to where the model is."""
    pieces = tree_pieces(tree)
    if by_pieces(pieces, model.device.type, model.compute_dtype):
        return TreeAttend(pieces)
    from insitu.training.attention.flex import FlexAttend

    return FlexAttend.of(tree, model.device)


def by_pieces(pieces: Sequence[Piece], device: str, dtype: torch.dtype) -> bool:
    """Whether a tree's attention runs piece by piece on a kind of device."""
    long = sum(p.q1 - p.q0 for p in pieces) >= LONG * len(pieces)
    return device != "cuda" or (dtype != torch.float32 and long)


def _index(array: IntArray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
