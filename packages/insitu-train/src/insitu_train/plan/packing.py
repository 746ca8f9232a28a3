"""Packs rows into micro-batches and assigns them to ranks.

Rows are sorted by their ids, so rows with a long common prefix are neighbours; a micro-batch is a run of
neighbours. Layout `prefix` computes the common prefix once and every row's rest right-padded; `tree` computes
every shared token once (prefix_tree.py); `rows` gives every row a pass of its own. Dynamic programming over
the sorted rows finds the cuts of least cost: tokens through the matrices, query-key pairs, passes. Packing
does not change what is trained.
Per layer a token costs 2 operations per weight, a pair 4 per head dimension (score and sum).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from insitu.errors import ConfigError, boundary
from insitu.types import IntArray
from insitu_train.plan.prefix import Sorted, sort_rows

Layout = Literal["prefix", "tree", "rows"]
PAIR_COST = 0.001
"""Cost of one query-key pair, in units of one token through the matrices (small models)."""
BATCH_COST = 64.0
"""Overhead of one more forward and backward pass, in tokens."""
MAX_ROWS = 256
"""Most rows of one micro-batch; bounds the planner's own time."""
SHARES = (1.0, 0.5, 0.34, 0.25, 0.17, 0.125)
"""Bounds on the cost of one micro-batch that are tried with several ranks, as parts of a rank's share."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass."""

    prefix: int
    """Leading tokens that all rows share, computed once; 0 for a tree and for layout `rows`."""
    rows: tuple[int, ...]
    """Indices into the plan's rows, in lexicographic order of their ids."""
    tokens: int
    """Tokens of the pass: prefix + rows x longest rest, padding included; or all tokens of the tree."""
    rank: int = 0
    """Rank that computes it, or the first one."""
    ranks: int = 1
    """Successive ranks that compute it together; the trainer makes it several where none holds its row."""
    layout: Layout = "prefix"


@dataclass(frozen=True, slots=True)
class _Table:
    """Values for every run of sorted rows: entry [c - 1, e] is for the c rows before e."""

    prefix: Ints
    tokens: Ints
    cost: Floats


def pack(
    ids: Sequence[IntArray],
    first_trained: Sequence[int],
    token_budget: int,
    *,
    layout: Layout = "prefix",
    ranks: int = 1,
    pair_cost: float = PAIR_COST,
    known: Sorted | None = None,
) -> tuple[MicroBatch, ...]:
    """Cut rows into micro-batches of at most `token_budget` tokens at the least total cost.

    ids[i] ends at the row's last trained token; first_trained[i] >= 1 is the index of its first one (no
    trained token may lie in a prefix). A row above the budget gets its own micro-batch. pair_cost: see
    PAIR_COST. known: result of `sort_rows`, computed when missing.
    """
    if not ids:
        return ()
    found = known or sort_rows(ids)
    lengths = np.array([len(ids[i]) for i in found.order], np.int64)
    shared = np.array(found.shared, np.int64)
    if layout == "tree":
        table = _tree_table(lengths, shared, pair_cost)
    else:
        if layout == "rows":
            first_trained, token_budget = [0] * len(ids), 0
        first = np.array([first_trained[i] for i in found.order], np.int64)
        table = _prefix_table(lengths, shared, first, pair_cost)
    # A single row may exceed the budget.
    table.cost[1:][table.tokens[1:] > token_budget] = np.inf
    cuts, rank_of = _share_out(table, ranks) if ranks > 1 else (_cut(table.cost), ())
    return tuple(
        MicroBatch(
            prefix=int(table.prefix[end - start - 1, end]),
            rows=found.order[start:end],
            tokens=int(table.tokens[end - start - 1, end]),
            rank=rank_of[n] if rank_of else 0,
            layout=layout,
        )
        for n, (start, end) in enumerate(cuts)
    )


def _blank(rows: int) -> _Table:
    shape = (min(MAX_ROWS, rows), rows + 1)
    return _Table(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, np.inf))


def _prefix_table(lengths: Ints, shared: Ints, first: Ints, pair_cost: float) -> _Table:
    n = len(lengths)
    table = _blank(n)
    prefix = first.copy()
    longest = lengths.copy()
    for count in range(1, len(table.cost) + 1):
        if count > 1:  # one more row in front; ends are count..n
            front = slice(0, n - count + 1)
            prefix = np.minimum(np.minimum(prefix[1:], shared[1 : n - count + 2]), first[front])
            longest = np.maximum(longest[1:], lengths[front])
        width = longest - prefix
        tokens = prefix + count * width
        pairs = prefix * prefix / 2.0 + count * width * (prefix + width)
        _fill(table, count, prefix, tokens, pair_cost * pairs)
    return table


def _tree_table(lengths: Ints, shared: Ints, pair_cost: float) -> _Table:
    """Fill the table; a row adds to a tree the tokens it does not share with the previous row."""
    n = len(lengths)
    table = _blank(n)
    tokens = np.concatenate([[0], np.cumsum(lengths - shared)])
    pairs = np.concatenate([[0], np.cumsum(_triangle(lengths) - _triangle(shared))])
    for count in range(1, len(table.cost) + 1):
        first = slice(0, n - count + 1)
        more = tokens[count:] - tokens[1 : n - count + 2]
        sums = pairs[count:] - pairs[1 : n - count + 2]
        own = _triangle(lengths[first])
        _fill(table, count, np.zeros_like(more), lengths[first] + more, pair_cost * (own + sums))
    return table


def _triangle(n: Ints) -> Ints:
    """Query-key pairs of n tokens in a row."""
    return n * (n + 1) // 2


def _fill(table: _Table, count: int, prefix: Ints, tokens: Ints, attention: Floats) -> None:
    table.prefix[count - 1, count:] = prefix
    table.tokens[count - 1, count:] = tokens
    table.cost[count - 1, count:] = tokens + attention + BATCH_COST


def _cut(cost: Floats) -> list[tuple[int, int]]:
    """Return (start, end) of the runs of least total cost; smaller runs among equal plans."""
    most, n = cost.shape[0], cost.shape[1] - 1
    best = np.zeros(n + 1)
    came = [0] * (n + 1)
    for end in range(1, n + 1):
        reach = min(most, end)
        total = best[end - reach : end][::-1] + cost[:reach, end]
        count = int(total.argmin()) + 1
        best[end], came[end] = total[count - 1], end - count
    cuts = []
    while n:
        cuts.append((came[n], n))
        n = came[n]
    return cuts[::-1]


def _share_out(table: _Table, ranks: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Return runs and the rank of each such that the largest load of a rank is small.

    Longest-processing-time scheduling for several bounds on the cost of one run; the best is kept.
    """
    single = table.cost[0, 1:]
    least = _total(table.cost, _cut(table.cost))
    candidates: list[tuple[float, list[tuple[int, int]], tuple[int, ...]]] = []
    for share in SHARES:
        bound = max(least / ranks * share, float(single.max()))
        cuts = _cut(np.where(table.cost > bound, np.inf, table.cost))
        costs = [float(table.cost[end - start - 1, end]) for start, end in cuts]
        load = [0.0] * ranks
        rank_of = [0] * len(cuts)
        for n in sorted(range(len(cuts)), key=lambda n: (-costs[n], n)):
            rank_of[n] = load.index(min(load))
            load[rank_of[n]] += costs[n]
        candidates.append((max(load), cuts, tuple(rank_of)))
    _, best, ranked = min(candidates, key=lambda plan: plan[0])
    return best, ranked


def _total(cost: Floats, cuts: Sequence[tuple[int, int]]) -> float:
    return float(sum(cost[end - start - 1, end] for start, end in cuts))


def pair_cost(folder: Path) -> float:
    """Return the cost from the model folder's config.json (names as in transformers).

    Raises ConfigError when it cannot be read or lacks the shape of a layer.
    """
    with boundary(ConfigError, f"read the shape of the model in {folder}"):
        raw: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        shape = raw.get("text_config", raw)
        try:
            hidden, heads = int(shape["hidden_size"]), int(shape["num_attention_heads"])
            across = int(shape.get("moe_intermediate_size") or shape["intermediate_size"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{folder}/config.json lacks {error}") from error
    width = heads * int(shape.get("head_dim") or hidden // heads)
    narrow = width * int(shape.get("num_key_value_heads") or heads) // heads
    experts = int(shape.get("num_experts_per_tok") or 1) if shape.get("moe_intermediate_size") else 1
    weights = 2 * hidden * (width + narrow) + 3 * hidden * across * experts
    return 4 * width / (2 * weights)
