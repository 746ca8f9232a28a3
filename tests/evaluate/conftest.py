"""Puts this folder on the path of its tests: one lends another its run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
