"""Rollouts of insitu under other trainers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu_bridges.process import RolloutBatch, SourceProcess, open_source, task_ids

__all__ = ["RolloutBatch", "SourceProcess", "open_source", "task_ids"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the command line reads the verbs of this package."""
    if name not in __all__:
        raise AttributeError(f"module 'insitu_bridges' has no attribute {name!r}")
    return getattr(importlib.import_module("insitu_bridges.process"), name)
