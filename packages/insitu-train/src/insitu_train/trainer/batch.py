"""A micro-batch of a plan as tensors, in its layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu.types import BoolArray, IntArray
from insitu_train.attention.parts import PartAttend, RowRanks, RowSplit
from insitu_train.attention.tree import TreeAttend, by_pieces, tree_pieces
from insitu_train.loss.fused_head import chosen
from insitu_train.model.base import Attend, Policy
from insitu_train.model.experts import replayed
from insitu_train.model.hf import HfPolicy
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.prefix_tree import Tree, build_tree
from insitu_train.plan.step import PlanRow, StepPlan


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows after a shared prefix."""

    prefix: Tensor
    """[P] int64."""
    ids: Tensor
    """[B, T] int64, the rows after the prefix, right-padded with 0."""
    mask: Tensor
    """[B, T] bool."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """One rank's tokens of a row that several compute."""

    ids: IntArray
    """[U] of this rank, filling included."""
    positions: IntArray
    """[U] in the row; of filling the last one."""
    at: IntArray
    """[N] index in `ids` of each predicting token."""
    target: IntArray
    """[N] the trained id, which may be another rank's."""
    own: IntArray
    """[U] index in the row, beyond its end for filling."""
    attend: PartAttend


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """A micro-batch as tensors; per-token ones list masked tokens, row by row."""

    rows: tuple[PlanRow, ...]
    counts: list[int]
    """Masked tokens of each row."""
    layout: Padded | Tree | RowPart
    mu: Tensor
    """[N] the sampler's log-probabilities."""
    versions: Tensor
    """[N] int32."""
    advantage: Tensor
    """[N] its row's."""
    weight: Tensor
    """[N] its row's."""
    experts: Tensor | None
    """[U, layers, k] int16 of each token of the pass, in its order; -1 = the router chooses."""


def make_batch(
    plan: StepPlan, micro: MicroBatch, device: torch.device | None = None, ranks: RowRanks | None = None
) -> TensorBatch:
    """Build the tensors of one micro-batch; per-token ones are on `device`.

    ranks: who computes a micro-batch of several; the plan's row has this rank's mask (`own_mask`).
    """
    rows = tuple(plan.rows[i] for i in micro.rows)
    counts = [int(row.mask.sum()) for row in rows]
    layout: Padded | Tree | RowPart
    if micro.ranks > 1 and ranks is not None:
        layout = _part(rows[0], ranks)
    else:
        layout = build_tree(rows) if micro.layout == "tree" else _padded(rows, micro.prefix, sum(counts))

    def per_token(parts: list[np.ndarray[tuple[int], Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return TensorBatch(
        rows=rows,
        counts=counts,
        layout=layout,
        mu=per_token([row.logprobs[row.mask] for row in rows]),
        versions=per_token([row.versions[row.mask] for row in rows]),
        advantage=per_token([np.full(n, r.advantage, np.float32) for r, n in zip(rows, counts, strict=True)]),
        weight=per_token([np.full(n, r.weight, np.float32) for r, n in zip(rows, counts, strict=True)]),
        experts=_experts(rows, layout),
    )


def split_of(row: PlanRow, world: int) -> RowSplit:
    """Return how the tokens of a row that predict others are spread over ranks: all but its last."""
    return RowSplit(len(row.ids) - 1, world)


def own_mask(row: PlanRow, rank: int, world: int) -> BoolArray:
    """Return the row's mask [T] without the tokens that other ranks predict."""
    split = split_of(row, world)
    mask, own = np.zeros_like(row.mask), split.positions(rank)
    predicted = own[own < split.tokens] + 1
    mask[predicted] = row.mask[predicted]
    return mask


def _part(row: PlanRow, ranks: RowRanks) -> RowPart:
    split = split_of(row, ranks.world)
    own = split.positions(ranks.rank)
    ids = np.zeros(len(own), np.int32)
    real = own < split.tokens
    ids[real] = row.ids[own[real]]
    trained = np.flatnonzero(row.mask)
    return RowPart(
        ids=ids,
        positions=np.minimum(own, split.tokens - 1),
        at=np.searchsorted(own, trained - 1).astype(np.int32),
        target=row.ids[trained],
        own=own,
        attend=PartAttend(split, ranks),
    )


def _experts(rows: Sequence[PlanRow], layout: Padded | Tree | RowPart) -> Tensor | None:
    """Return the experts of the pass, None when no row has any."""
    known = [row.experts for row in rows if row.experts is not None]
    if not known:
        return None
    each = known[0].shape[1:]
    if any(one.shape[1:] != each for one in known):
        raise TrainError("rows of one micro-batch have experts of models with other layers")
    if isinstance(layout, Tree):
        found = np.full((layout.tokens, *each), -1, np.int16)
        for at, row in enumerate(rows):
            if row.experts is not None:
                found[layout.path(at)] = row.experts
        return torch.from_numpy(found)
    if isinstance(layout, RowPart):
        found = np.full((len(layout.own), *each), -1, np.int16)
        real = layout.own < len(rows[0].ids) - 1
        found[real] = known[0][layout.own[real]]
        return torch.from_numpy(found)
    # as `fused_head.chosen` runs them: the last prefix token in each row, the last of the row not at all
    cut = max(0, len(layout.prefix) - 1)
    width = max(len(row.ids) for row in rows) - 1 - cut
    found = np.full((cut + len(rows) * width, *each), -1, np.int16)
    for at, row in enumerate(rows):
        if row.experts is not None:
            found[:cut] = row.experts[:cut]
            start = cut + at * width
            found[start : start + len(row.ids) - 1 - cut] = row.experts[cut:-1]
    return torch.from_numpy(found)


def _padded(rows: Sequence[PlanRow], cut: int, trained: int) -> Padded:
    width = max(len(row.ids) for row in rows) - cut
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.bool_)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids) - cut] = row.ids[cut:]
        mask[at, : len(row.ids) - cut] = row.mask[cut:]
    if int(mask.sum()) != trained:
        raise TrainError(f"a micro-batch's prefix of {cut} tokens covers trained tokens")
    return Padded(
        torch.from_numpy(rows[0].ids[:cut].astype(np.int64)), torch.from_numpy(ids), torch.from_numpy(mask)
    )


def locate(batch: TensorBatch, token: int) -> tuple[PlanRow, int]:
    """Return row and token index of the batch's masked token number `token`."""
    for row, positions in _masked(batch):
        if token < len(positions):
            return row, int(positions[token])
        token -= len(positions)
    raise TrainError("token index out of range of its micro-batch")


def _masked(batch: TensorBatch) -> Iterator[tuple[PlanRow, np.ndarray[tuple[int], np.dtype[np.intp]]]]:
    for row in batch.rows:
        yield row, np.flatnonzero(row.mask)


def states(model: Policy, batch: TensorBatch, *, replay: bool = False) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, d] that predict the batch's trained tokens, and those tokens [N] int64.

    Both are row by row. replay: tokens run through the sampler's experts, where the batch has them. Raises
    TrainError when the model has other experts.
    """
    if replay and batch.experts is not None:
        if not isinstance(model, HfPolicy):
            raise TrainError("the sampler returned experts, and the trained model has none")
        with replayed(model, batch.experts):
            return states(model, batch)
    if isinstance(batch.layout, Padded):
        hidden, targets, _ = chosen(model, batch.layout.prefix, batch.layout.ids, batch.layout.mask)
        return hidden, targets
    flat = batch.layout
    hidden = model.flat(_index(flat.ids), _index(flat.positions), _attend(flat, model))
    return hidden[_index(flat.at).to(hidden.device)], _index(flat.target).to(hidden.device)


def _attend(tree: Tree | RowPart, model: Policy) -> Attend:
    """Return the attention of a flat layout on the model's device."""
    if isinstance(tree, RowPart):
        return tree.attend
    pieces = tree_pieces(tree)
    if by_pieces(pieces, model.device.type, model.compute_dtype, model.head_dim):
        return TreeAttend(pieces)
    from insitu_train.attention.flex import FlexAttend

    return FlexAttend.of(tree, model.device)


def _index(array: IntArray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
