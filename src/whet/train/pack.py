"""Which rows share a forward pass: longest common prefixes, micro-batches of least cost. Pure numpy.

Rows are sorted by their ids, so rows with a long common prefix are neighbours; a micro-batch is a run of
neighbours. It computes the common prefix once and every row's rest, right-padded. Where to cut is solved
exactly by dynamic programming over the sorted rows. No trained token may lie in a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whet.types import IntArray

PAIR_COST = 0.001
"""Cost of one query-key pair, in units of one token through the matrices (small models)."""
BATCH_COST = 64.0
"""Cost of one more forward and backward pass, in tokens: the overhead of small kernels."""
MAX_ROWS = 256
"""Most rows in one micro-batch; bounds the planner's own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass."""

    prefix: int
    """Tokens at the start of every row that are the same in all of them; computed once."""
    rows: tuple[int, ...]
    """Indices into the plan's rows."""
    tokens: int
    """Tokens that the pass computes, padding included: prefix + rows x longest rest."""


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Number of leading ids that are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _sorted_rows(ids: Sequence[IntArray]) -> list[int]:
    """Indices in lexicographic order of ids: big-endian bytes compare as the numbers do."""
    keys = [row.astype(">i4").tobytes() for row in ids]
    return sorted(range(len(ids)), key=lambda i: (keys[i], i))


def pack(ids: Sequence[IntArray], first_trained: Sequence[int], token_budget: int) -> tuple[MicroBatch, ...]:
    """Cut rows into micro-batches of at most `token_budget` tokens at the least total cost.

    ids[i] ends at the row's last trained token; first_trained[i] >= 1 is the index of its first one. A row
    that alone exceeds the budget gets its own micro-batch: long rows are trained, not dropped.
    """
    order = _sorted_rows(ids)
    n = len(order)
    lengths = np.array([len(ids[i]) for i in order], dtype=np.int64)
    first = np.array([first_trained[i] for i in order], dtype=np.int64)
    shared = np.array(
        [common_prefix(ids[order[k]], ids[order[k + 1]]) for k in range(n - 1)] + [0], dtype=np.int64
    )
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    came = np.zeros(n + 1, dtype=np.int64)
    for end in range(1, n + 1):
        start = max(0, end - MAX_ROWS)
        _, tokens, cost = _spans(lengths, first, shared, start, end)
        total = best[start:end] + cost
        total[:-1][tokens[:-1] > token_budget] = np.inf
        # the last minimum: of equal plans, the one with the smaller micro-batch
        came[end] = start + len(total) - 1 - int(np.argmin(total[::-1]))
        best[end] = total[came[end] - start]
    batches: list[MicroBatch] = []
    end = n
    while end:
        start = int(came[end])
        prefix, tokens, _ = _spans(lengths, first, shared, start, end)
        batches.append(MicroBatch(prefix=int(prefix[0]), rows=tuple(order[start:end]), tokens=int(tokens[0])))
        end = start
    return tuple(reversed(batches))


def _spans(
    lengths: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    shared: npt.NDArray[np.int64],
    start: int,
    end: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For every k in [start, end): prefix, tokens and cost of the micro-batch of sorted rows k..end-1."""
    reach = np.minimum.accumulate(first[start:end][::-1])[::-1]
    inner = np.minimum.accumulate(shared[start : end - 1][::-1])[::-1]
    prefix = reach.copy()
    prefix[:-1] = np.minimum(reach[:-1], inner)
    longest = np.maximum.accumulate(lengths[start:end][::-1])[::-1]
    width = longest - prefix
    count = np.arange(end - start, 0, -1)
    tokens = prefix + count * width
    pairs = prefix * prefix / 2.0 + count * width * (prefix + width)
    return prefix, tokens, tokens + PAIR_COST * pairs + BATCH_COST
