"""Rows as one prefix tree in which every shared token occurs once.

    rows   1 2 3 4      tree   1 2 -+- 3 4        ids        1 2 3 4 3 9 7
           1 2 3 9                  |   `- 9      positions  0 1 2 3 .. (depth in the row)
           7                   7

Tokens are in preorder, children in the order of their ids. A token sees the earlier tokens whose node's `end`
is greater than its index. Trained tokens are separate entries, since one predicting token may have targets of
several rows, and one token may be trained by several rows with different log-probabilities.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from insitu.errors import TrainError
from insitu.types import FloatArray, IntArray
from insitu_train.plan.prefix import Sorted, sort_rows
from insitu_train.plan.step import PlanRow

S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """U tokens in N nodes, for R rows, with E trained tokens; index arrays are int32."""

    ids: IntArray = field(repr=False)
    """[U] tokens in preorder."""
    positions: IntArray = field(repr=False)
    """[U] depth of each token: its position in every row that contains it."""
    start: IntArray
    """[N + 1] tokens of node n are start[n] .. start[n + 1]; no node is empty."""
    parent: IntArray
    """[N] parent node, always an earlier one; -1 at a root."""
    end: IntArray
    """[N] first token after the node's subtree. Token q sees token k <= q when end[node of k] > q."""
    leaf: IntArray
    """[R] node that ends with the last token of row r."""
    row: IntArray = field(repr=False)
    """[E] row of each entry, ordered by row, then position."""
    at: IntArray = field(repr=False)
    """[E] index in `ids` of the predicting token."""
    target: IntArray = field(repr=False)
    """[E] the trained id; its position in its row is positions[at] + 1."""
    mu: FloatArray = field(repr=False)
    """[E] the sampler's log-probability."""
    version: IntArray = field(repr=False)
    """[E] the policy version that sampled it."""
    advantage: FloatArray = field(repr=False)
    """[E] its row's."""
    weight: FloatArray = field(repr=False)
    """[E] its row's."""

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def node(self) -> IntArray:
        """[U] node of each token."""
        return np.repeat(np.arange(len(self.parent), dtype=np.int32), np.diff(self.start))

    def path(self, row: int) -> IntArray:
        """Return the indices in `ids` of the tokens of a row, in order."""
        parts = []
        node = int(self.leaf[row])
        while node >= 0:
            parts.append(np.arange(self.start[node], self.start[node + 1], dtype=np.int32))
            node = int(self.parent[node])
        return np.concatenate(parts[::-1])


@dataclass(slots=True)
class _Branch:
    """The part of a path that one row added; depths from `depth` on are at index `base` + depth."""

    depth: int
    base: int


@dataclass(slots=True)
class _Grown:
    """The tree's shape while rows are added in sorted order."""

    cuts: set[int] = field(default_factory=set)
    """Token indices at which a node starts."""
    above: dict[int, int] = field(default_factory=dict)
    """Start of a branch -> token before it; -1 at a root."""
    tip: list[int] = field(default_factory=list)
    """[R] index of the last token of each row, in sorted order."""
    at: list[IntArray] = field(default_factory=list)
    """[R] indices of the predicting tokens of each row, in sorted order."""


def build_tree(rows: Sequence[PlanRow], known: Sorted | None = None) -> Tree:
    """Return the tree of `rows`. known: result of `sort_rows`, computed when missing.

    Raises TrainError for a row without tokens and for a trained first token.
    """
    ids = [row.ids for row in rows]
    trained = [np.flatnonzero(row.mask) for row in rows]
    for i, row in enumerate(rows):
        if not len(row.ids) or (len(trained[i]) and not trained[i][0]):
            raise TrainError(f"row {i} of a tree is empty or trains its first token, which nothing predicts")
    found = known or sort_rows(ids, [row.experts for row in rows])
    grown = _grow(found, [len(i) for i in ids], trained)
    tails = [(ids[row], shared) for row, shared in zip(found.order, found.shared, strict=True)]
    start, parent, end = _nodes(grown, sum(len(i) - shared for i, shared in tails))
    rank = np.argsort(np.array(found.order, np.int32), kind="stable")
    tips = np.array(grown.tip, np.int32)[rank]
    return Tree(
        ids=_joined([i[shared:] for i, shared in tails], np.int32),
        positions=_joined([np.arange(shared, len(i), dtype=np.int32) for i, shared in tails], np.int32),
        start=start,
        parent=parent,
        end=end,
        leaf=(np.searchsorted(start, tips, side="right") - 1).astype(np.int32),
        row=np.repeat(np.arange(len(rows), dtype=np.int32), [len(t) for t in trained]),
        at=_joined([grown.at[k] for k in rank], np.int32),
        target=_joined([row.ids[t] for row, t in zip(rows, trained, strict=True)], np.int32),
        mu=_joined([row.logprobs[t] for row, t in zip(rows, trained, strict=True)], np.float32),
        version=_joined([row.versions[t] for row, t in zip(rows, trained, strict=True)], np.int32),
        advantage=_spread([row.advantage for row in rows], trained),
        weight=_spread([row.weight for row in rows], trained),
    )


def _grow(found: Sorted, lengths: Sequence[int], trained: Sequence[npt.NDArray[np.intp]]) -> _Grown:
    """Add the rows in sorted order, with the previous row's path as a stack of branches."""
    grown = _Grown()
    path: list[_Branch] = []
    size = 0
    for row, shared in zip(found.order, found.shared, strict=True):
        while path and path[-1].depth >= shared:
            path.pop()
        if lengths[row] > shared:
            above = path[-1].base + shared - 1 if path else -1
            grown.above[size] = above
            grown.cuts |= {size, above + 1}
            path.append(_Branch(shared, size - shared))
            size += lengths[row] - shared
        grown.tip.append(path[-1].base + lengths[row] - 1)
        depths = np.array([branch.depth for branch in path])
        bases = np.array([branch.base for branch in path])
        predicting = trained[row] - 1
        grown.at.append(
            (predicting + bases[np.searchsorted(depths, predicting, side="right") - 1]).astype(np.int32)
        )
    return grown


def _nodes(grown: _Grown, size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return start [N + 1], parent [N] and end [N]."""
    cuts = sorted(grown.cuts | {size})
    start = np.array(cuts, np.int32)
    # Where no branch starts, a node continues the one before it.
    parent = [
        bisect_right(cuts, grown.above[cut]) - 1 if cut in grown.above else n - 1
        for n, cut in enumerate(cuts[:-1])
    ]
    end = list(cuts[1:])
    for n in range(len(parent) - 1, -1, -1):
        if parent[n] >= 0:
            end[parent[n]] = max(end[parent[n]], end[n])
    return start, np.array(parent, np.int32), np.array(end, np.int32)


def _joined(parts: Sequence[npt.NDArray[S]], dtype: type[S]) -> npt.NDArray[S]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _spread(values: Sequence[float], trained: Sequence[npt.NDArray[np.intp]]) -> FloatArray:
    return np.repeat(np.array(values, np.float32), [len(t) for t in trained])
