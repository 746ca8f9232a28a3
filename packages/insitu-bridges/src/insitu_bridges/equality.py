"""Comparison of values bit by bit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def difference(a: Any, b: Any, without: Collection[str] = (), where: str = "") -> str:
    """Return the path of the first field in which two values differ, or empty.

    Arrays are equal when type, shape and bits are. `without`: paths that are not compared.
    """
    if where in without and where:
        return ""
    if isinstance(a, np.ndarray):
        same = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        return "" if same and a.tobytes() == b.tobytes() else where
    if type(a) is not type(b):
        return where or "type"
    if is_dataclass(a) and not isinstance(a, type):
        for name in (f.name for f in fields(a)):
            path = f"{where}.{name}" if where else name
            if found := difference(getattr(a, name), getattr(b, name), without, path):
                return found
        return ""
    if isinstance(a, tuple) and len(a) == len(b):
        parts = (
            difference(x, y, without, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
        return next(filter(None, parts), "")
    return "" if a == b else where
