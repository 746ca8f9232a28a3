"""Tests that `make test` skips and `make test-full` runs: they need a real server or many minutes."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), *(str(_TESTS / name) for name in ("gateway", "chat", "training"))]
