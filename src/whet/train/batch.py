"""A micro-batch of a plan as tensors. Called by trainer.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whet.errors import TrainError
from whet.train.pack import MicroBatch
from whet.train.plan import Row, StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as tensors; the per-token ones list masked tokens, row by row."""

    rows: tuple[Row, ...]
    prefix: Tensor
    """[P] int64."""
    ids: Tensor
    """[B, T] int64, the rests of the rows, right-padded with 0."""
    mask: Tensor
    """[B, T] bool."""
    mu: Tensor
    """[N] the sampler's log-probabilities."""
    versions: Tensor
    """[N] int32."""
    advantage: Tensor
    """[N] its row's."""
    weight: Tensor
    """[N] its row's."""


def make_batch(plan: StepPlan, micro: MicroBatch, device: torch.device | None = None) -> Batch:
    """Lay one micro-batch of a plan out as tensors; those per masked token on `device`."""
    rows = tuple(plan.rows[i] for i in micro.rows)
    cut = micro.prefix
    width = max(len(row.ids) for row in rows) - cut
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.bool_)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids) - cut] = row.ids[cut:]
        mask[at, : len(row.ids) - cut] = row.mask[cut:]
    counts = mask.sum(1)
    if int(counts.sum()) != sum(int(row.mask.sum()) for row in rows):
        raise TrainError(f"a micro-batch's prefix of {cut} tokens covers trained tokens")
    return Batch(
        rows=rows,
        prefix=torch.from_numpy(rows[0].ids[:cut].astype(np.int64)),
        ids=torch.from_numpy(ids),
        mask=torch.from_numpy(mask),
        mu=torch.from_numpy(np.concatenate([row.logprobs[row.mask] for row in rows])).to(device),
        versions=torch.from_numpy(np.concatenate([row.versions[row.mask] for row in rows])).to(device),
        advantage=torch.from_numpy(np.repeat([row.advantage for row in rows], counts).astype(np.float32)).to(
            device
        ),
        weight=torch.from_numpy(np.repeat([row.weight for row in rows], counts).astype(np.float32)).to(
            device
        ),
    )


def locate(batch: Batch, token: int) -> tuple[Row, int]:
    """Row and token index within it of the batch's masked token number `token`."""
    for row, positions in _masked(batch):
        if token < len(positions):
            return row, int(positions[token])
        token -= len(positions)
    raise TrainError("a token index lies outside its micro-batch")


def _masked(batch: Batch) -> Iterator[tuple[Row, np.ndarray[tuple[int], np.dtype[np.intp]]]]:
    for row in batch.rows:
        yield row, np.flatnonzero(row.mask)
