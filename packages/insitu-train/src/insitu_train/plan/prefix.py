"""Lexicographic order of rows and the longest common prefix of neighbours.

Order and prefix lengths describe the tree that the rows form: in sorted order a row adds the tokens beyond
its prefix. Ids are compared in blocks, each shared id once: a row is compared with one row of its bundle, and
later only with rows it shares more with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from insitu.types import ExpertArray, IntArray

_FIRST, _MOST = 256, 32768
"""Ids compared at once: few at first, as most rows diverge early or late, then as many as fit a cache."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """Rows in lexicographic order; equal rows by index."""

    order: tuple[int, ...]
    """Indices of the rows."""
    shared: tuple[int, ...]
    """shared[k]: leading ids, computed by the same experts, that row order[k] has in common with row
    order[k - 1]; 0 for the first."""


def common_prefix(a: IntArray, b: IntArray, start: int = 0) -> int:
    """Return the number of equal leading ids; the first `start` are known to be equal."""
    n = min(len(a), len(b))
    step = _FIRST
    while start < n:
        stop = min(n, start + step)
        differ = a[start:stop] != b[start:stop]
        first = int(differ.argmax())
        if differ[first]:
            return start + first
        start, step = stop, min(_MOST, step * 4)
    return n


def sort_rows(ids: Sequence[IntArray], experts: Sequence[ExpertArray | None] = ()) -> Sorted:
    """Sort rows and return the prefix lengths of neighbours.

    experts: of each row's tokens. A token that other experts computed is not the same one.
    """
    found = _sorted(ids)
    if all(row is None for row in experts):
        return found
    joint = [
        shared if k == 0 else _same_experts(experts[found.order[k - 1]], experts[row], shared)
        for k, (row, shared) in enumerate(zip(found.order, found.shared, strict=True))
    ]
    return Sorted(found.order, tuple(joint))


def _same_experts(a: ExpertArray | None, b: ExpertArray | None, count: int) -> int:
    """Return how many of the first `count` tokens have the same experts in both rows."""
    if a is None or b is None:
        return count if a is b else 0
    differ = (a[:count] != b[:count]).any(axis=(1, 2))
    return int(differ.argmax()) if differ.any() else count


def _sorted(ids: Sequence[IntArray]) -> Sorted:
    order: list[int] = []
    shared: list[int] = []
    # Bundles to be sorted, the next one last: rows, length of their common prefix, length of the prefix
    # shared with the predecessor.
    todo = [(list(range(len(ids))), 0, 0)] if ids else []
    while todo:
        rows, known, before = todo.pop()
        if len(rows) == 1:
            order.append(rows[0])
            shared.append(before)
            continue
        bundles = _around(ids, rows, known)
        joints = [before, *(min(a[1], b[1]) for a, b in pairwise(bundles))]
        ready = [(members, depth, joint) for (members, depth), joint in zip(bundles, joints, strict=True)]
        todo += reversed(ready)
    return Sorted(tuple(order), tuple(shared))


def _around(ids: Sequence[IntArray], rows: list[int], known: int) -> list[tuple[list[int], int]]:
    """Return bundles of rows around the first of `rows`: (members, leading ids shared with the first).

    Members of a bundle diverge from the first row at the same place with the same id, so they share one more.
    The first row and its equals are bundles of one. Bundles are in order.
    """
    pivot = ids[rows[0]]
    end = len(pivot)
    found: dict[tuple[bool, int, int], list[int]] = {}
    equal = [rows[0]]
    for row in rows[1:]:
        mine = ids[row]
        depth = common_prefix(pivot, mine, known)
        if depth == len(mine) == end:
            equal.append(row)
        elif depth == len(mine):
            found.setdefault((False, depth, -1), []).append(row)
        else:
            after = depth == end or bool(mine[depth] > pivot[depth])
            found.setdefault((after, -depth if after else depth, int(mine[depth])), []).append(row)
    keys = sorted(found)
    bundles = [(found[key], key[1]) for key in keys if not key[0]]
    bundles += [([row], end) for row in equal]
    bundles += [(found[key], -key[1]) for key in keys if key[0]]
    return bundles
