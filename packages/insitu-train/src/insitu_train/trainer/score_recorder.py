"""Keeps the scores of a step's trained tokens for the run directory.

It copies tensors that the pass has anyway: it computes nothing on the device and takes no part in the loss.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from insitu_train.loss.fused_head import Scores
from insitu_train.loss.losses import TokenLoss
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.step import StepPlan
from insitu_train.scores import BOUNDED, CLIPPED, MISMATCHED, RowScores, write_scores
from insitu_train.trainer.batch import TensorBatch


class ScoreRecorder:
    """Scores of the rows, or parts of rows, that this rank computes, from the first pass of one step."""

    def __init__(self, plan: StepPlan, path: Path, rank: int) -> None:
        self._plan, self._path, self._rank = plan, path, rank
        self._rows: dict[int, RowScores] = {}

    def add(
        self, micro: MicroBatch, batch: TensorBatch, scores: Scores, out: TokenLoss, excluded: Tensor | None
    ) -> None:
        """Copy a micro-batch; one that is computed again replaces itself."""
        gap = scores.logp.detach().float().cpu().numpy() - batch.mu.cpu().numpy()
        entropy = scores.entropy.detach().float().cpu().numpy()
        flags = np.zeros(len(gap), np.uint8)
        for bit, marked in ((CLIPPED, out.cut), (BOUNDED, out.corrected), (MISMATCHED, excluded)):
            if marked is not None:
                flags |= marked.cpu().numpy().astype(np.uint8) * np.uint8(bit)
        start = 0
        for index, row, count in zip(micro.rows, batch.rows, batch.counts, strict=True):
            part = slice(start, start := start + count)
            if not count:
                continue  # its trained tokens are other ranks'
            self._rows[index] = RowScores(
                rollout_id=row.rollout_id, segment=row.segment, mask=row.mask,
                gap=gap[part], entropy=entropy[part], flags=flags[part],
            )  # fmt: skip

    def write(self) -> None:
        """Write the file; a failure is logged."""
        rows = (self._rows[index] for index in sorted(self._rows))
        write_scores(self._path, self._rank, self._plan.digest, rows)
