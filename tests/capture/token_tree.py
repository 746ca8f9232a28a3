"""A rollout as a token tree, for trainers with tree attention: every id once, depth-first; pure.

`expand` defines what such a trainer needs: a parent per token, positions, and which earlier tokens each token
sees. `check_tree` proves that every branch of the tree is a chain of the trajectory and that the same tokens
are trained. Weights: `once` is 1 per trained token; `branch_mean` is the fraction of branches (of the token's
kind) through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from insitu.capture.segments import version_row
from insitu.types import BoolArray, FloatArray, IntArray, SegmentKind, Trajectory, Turn
from insitu_train.branches import by_index, chain_ends, kind_of

WeightMode = Literal["once", "branch_mean"]
NodeKind = Literal["context", "sampled", "demonstrated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """[n] arrays over all tokens, [k] arrays over nodes, both in depth-first order."""

    mode: WeightMode
    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    """0 where mask is False, and for demonstrated nodes."""
    versions: IntArray = field(repr=False)
    weights: FloatArray = field(repr=False)
    """0 where mask is False."""
    starts: IntArray = field(repr=False)
    """[k + 1] first token of each node; the last entry is n."""
    parents: IntArray = field(repr=False)
    """[k] parent node, -1 at a root; always smaller than the node."""
    turns: IntArray = field(repr=False)
    """[k] turn sampled at the node, -1 for context."""
    kinds: tuple[NodeKind, ...] = field(repr=False)
    """`context` also for turns that are not trained."""


@dataclass(slots=True)
class _Node:
    parent: int
    ids: IntArray
    turn: Turn | None
    """None for context."""
    ends: dict[SegmentKind, int] = field(default_factory=lambda: {"sampled": 0, "demonstrated": 0})
    """Branches through this node."""
    children: list[int] = field(default_factory=list)


def tree(trajectory: Trajectory, mode: WeightMode) -> TokenTree:
    """Return all trained branches. Raises CaptureError for turns that form no tree."""
    turns = by_index(trajectory.turns)
    nodes, node_of = _grow(turns)
    total: dict[SegmentKind, int] = {"sampled": 0, "demonstrated": 0}
    for end in chain_ends(turns):
        kind: SegmentKind = "demonstrated" if end.excluded else "sampled"
        nodes[node_of[end.index]].ends[kind] += 1
        total[kind] += 1
    for node in reversed(nodes):
        if node.parent >= 0:
            for kind, count in node.ends.items():
                nodes[node.parent].ends[kind] += count
    return _flatten(nodes, _depth_first(nodes), total, mode)


def _grow(turns: dict[int, Turn]) -> tuple[list[_Node], dict[int, int]]:
    """Return (nodes, parents first; turn -> node). Turns with one prompt share its context node."""
    nodes: list[_Node] = []
    node_of: dict[int, int] = {-1: -1}
    contexts: dict[tuple[int, bytes], int] = {}
    for turn in turns.values():
        place = (turn.parent, turn.context_ids.tobytes())
        if place not in contexts:
            contexts[place] = len(nodes)
            nodes.append(_Node(node_of[turn.parent], turn.context_ids, None))
        node_of[turn.index] = len(nodes)
        nodes.append(_Node(contexts[place], turn.ids, turn))
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            nodes[node.parent].children.append(index)
    return nodes, node_of


def _depth_first(nodes: list[_Node]) -> list[int]:
    """Return the nodes on some branch, depth-first."""
    order: list[int] = []
    left = [index for index, node in enumerate(nodes) if node.parent < 0]
    left.reverse()
    while left:
        index = left.pop()
        if any(nodes[index].ends.values()):
            order.append(index)
            left += reversed(nodes[index].children)
    return order


def _flatten(
    nodes: list[_Node], order: list[int], total: dict[SegmentKind, int], mode: WeightMode
) -> TokenTree:
    place = {index: at for at, index in enumerate(order)}
    starts = np.zeros(len(order) + 1, dtype=np.int32)
    starts[1:] = np.cumsum([len(nodes[index].ids) for index in order], dtype=np.int32)
    size = int(starts[-1])
    mask, logprobs = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.float32)
    versions, weights = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.float32)
    kinds: list[NodeKind] = []
    for at, index in enumerate(order):
        turn = nodes[index].turn
        kind = None if turn is None else kind_of(turn)
        kinds.append(kind or "context")
        if turn is None or kind is None:
            continue
        span = slice(int(starts[at]), int(starts[at + 1]))
        mask[span] = True
        versions[span] = version_row(turn.version_runs, len(turn.ids))
        weights[span] = 1.0 if mode == "once" else nodes[index].ends[kind] / total[kind]
        if turn.logprobs is not None:
            logprobs[span] = turn.logprobs
    return TokenTree(
        mode=mode,
        ids=_joined([nodes[index].ids for index in order]),
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        weights=weights,
        starts=starts,
        parents=np.array([place.get(nodes[index].parent, -1) for index in order], dtype=np.int32),
        turns=np.array([-1 if (t := nodes[i].turn) is None else t.index for i in order], dtype=np.int32),
        kinds=tuple(kinds),
    )


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, dtype=np.int32)
