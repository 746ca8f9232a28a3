"""Check that an exported TokenTree holds the same as the chains; the arrays of its attention mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from token_tree import TokenTree

from insitu.errors import CaptureError
from insitu.types import BoolArray, IntArray, Trajectory
from insitu_train.branches import by_index, chain_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """[n] arrays that a tree attention mask needs."""

    ids: IntArray = field(repr=False)
    parents: IntArray = field(repr=False)
    """Token before this one on its branch; -1 for the first token of a root."""
    positions: IntArray = field(repr=False)
    """Distance from the root's first token, for rotary embeddings."""
    ends: IntArray = field(repr=False)
    """One past the last token below this one: token i sees token j when j <= i < ends[j]."""


def expand(whole: TokenTree) -> Expanded:
    """Return the arrays for a tree attention mask over the tokens in their stored order."""
    size, count = len(whole.ids), len(whole.parents)
    parents = np.arange(-1, size - 1, dtype=np.int32)
    positions = np.zeros(size, dtype=np.int32)
    ends = np.zeros(size, dtype=np.int32)
    last = np.full(count, -1, dtype=np.int32)  # last token on the path up to and with a node
    reach = whole.starts[1:].copy()  # one past the last token of a node's subtree
    for node in range(count):
        start, stop = int(whole.starts[node]), int(whole.starts[node + 1])
        above = int(whole.parents[node])
        before = -1 if above < 0 else int(last[above])
        depth = 0 if before < 0 else int(positions[before]) + 1
        if stop > start:
            parents[start] = before
            positions[start:stop] = np.arange(depth, depth + stop - start, dtype=np.int32)
        last[node] = stop - 1 if stop > start else before
    for node in range(count - 1, -1, -1):
        above = int(whole.parents[node])
        if above >= 0:
            reach[above] = max(reach[above], reach[node])
        ends[whole.starts[node] : whole.starts[node + 1]] = reach[node]
    return Expanded(ids=whole.ids, parents=parents, positions=positions, ends=ends)


def dense_mask(expanded: Expanded) -> BoolArray:
    """Return [n, n] True where token i (row) sees token j (column): itself or before it on its branch."""
    at = np.arange(len(expanded.ids))
    seen: BoolArray = (at[None, :] <= at[:, None]) & (at[:, None] < expanded.ends[None, :])
    return seen


def branch(whole: TokenTree, node: int) -> IntArray:
    """Return the token indices from the root to the end of `node`."""
    path = [node]
    while whole.parents[path[-1]] >= 0:
        path.append(int(whole.parents[path[-1]]))
    spans = [np.arange(whole.starts[n], whole.starts[n + 1], dtype=np.int32) for n in reversed(path)]
    return np.concatenate(spans, dtype=np.int32)


def check_tree(whole: TokenTree, trajectory: Trajectory) -> None:
    """Raise CaptureError unless the branches are the chains and the same tokens are trained."""
    expanded = expand(whole)
    node_of = {int(turn): node for node, turn in enumerate(whole.turns) if turn >= 0}
    ends = chain_ends(by_index(trajectory.turns))
    if len(ends) != len(trajectory.segments):
        raise CaptureError(f"{len(trajectory.segments)} segments for {len(ends)} branches")
    trained = np.zeros(len(whole.ids), dtype=np.int32)
    for end, segment in zip(ends, trajectory.segments, strict=True):
        where = f"branch of turn {end.index}"
        path = branch(whole, node_of[end.index])
        if not np.array_equal(whole.ids[path], segment.ids):
            raise CaptureError(f"{where}: the tree holds other ids than the chain")
        before = np.concatenate([np.array([-1], dtype=np.int32), path[:-1]])
        if not np.array_equal(expanded.parents[path], before):
            raise CaptureError(f"{where}: a token's ancestors are not the chain before it")
        if not np.array_equal(expanded.positions[path], np.arange(len(path))):
            raise CaptureError(f"{where}: a token's position is not its place in the chain")
        masked = path[segment.mask]
        trained[masked] += 1
        same_logprobs = np.array_equal(whole.logprobs[masked], segment.logprobs[segment.mask])
        if not same_logprobs or not np.array_equal(whole.versions[masked], segment.versions[segment.mask]):
            raise CaptureError(f"{where}: the tree holds other logprobs or versions than the chain")
    if not np.array_equal(trained, whole.mask.astype(np.int32)):
        raise CaptureError("the tree does not train exactly the tokens that the chains train")
