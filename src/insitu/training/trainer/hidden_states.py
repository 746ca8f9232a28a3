"""The forward pass of a micro-batch: hidden states that predict its trained tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from insitu.training.attention.tree import TreeAttend, by_pieces, tree_pieces
from insitu.training.loss.fused_head import chosen
from insitu.training.model.base import Attend, Policy
from insitu.training.plan.prefix_tree import Tree
from insitu.training.trainer.batch import Padded, TensorBatch
from insitu.types import IntArray


def states(model: Policy, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, d] that predict the batch's trained tokens, row by row, and those tokens [N]
    int64.
    """
    if isinstance(batch.layout, Padded):
        hidden, targets, _ = chosen(model, batch.layout.prefix, batch.layout.ids, batch.layout.mask)
        return hidden, targets
    tree = batch.layout
    hidden = model.flat(_index(tree.ids), _index(tree.positions), _tree_attend(tree, model))
    return hidden[_index(tree.at).to(hidden.device)], _index(tree.target).to(hidden.device)


def _tree_attend(tree: Tree, model: Policy) -> Attend:
    """Return the attention of a tree on the model's device."""
    pieces = tree_pieces(tree)
    if by_pieces(pieces, model.device.type, model.compute_dtype, model.head_dim):
        return TreeAttend(pieces)
    from insitu.training.attention.flex import FlexAttend

    return FlexAttend.of(tree, model.device)


def _index(array: IntArray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
