"""The same work on many rows, in threads where they hold enough to pay for them (numpy and hashing let go of
the interpreter). Results and the first error come in the order of the rows. Used by step.py and digest.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
_MANY = 1 << 20
"""Tokens from which threads pay."""


def each(work: Callable[[A], B], rows: Sequence[A], tokens: int) -> list[B]:
    """[work(row) for row in rows]; `tokens`: how many they hold together."""
    if tokens < _MANY or len(rows) < 2:
        return [work(row) for row in rows]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, rows))
