"""Maps a function over rows, in threads when they hold many tokens (numpy and hashing release the GIL)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
_MANY = 1 << 20
"""Tokens from which threads pay."""


def map_threaded(work: Callable[[A], B], rows: Sequence[A], tokens: int) -> list[B]:
    """Return [work(row) for row in rows]; tokens: number of tokens of all rows."""
    if tokens < _MANY or len(rows) < 2:
        return [work(row) for row in rows]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, rows))
