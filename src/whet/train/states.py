"""The forward pass of a micro-batch: what predicts its trained tokens. Called by trainer.py, reference.py."""

from __future__ import annotations

from torch import Tensor

from whet.train.batch import Batch
from whet.train.head import chosen
from whet.train.policy import Policy


def states(model: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """(hidden states [N, d] that predict the batch's trained tokens, row by row; those tokens [N] int64)."""
    hidden, targets, _ = chosen(model, batch.prefix, batch.ids, batch.mask)
    return hidden, targets
