"""Processes that end with their parent, however it ends (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

from whet.errors import TrainError

_PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> None:
    """Be killed when the parent dies, however it dies. Raises TrainError if it is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise TrainError(f"the parent (process {parent}) is gone")
