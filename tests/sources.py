"""Where other interpreters and children find insitu's packages, which tests import from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = os.pathsep.join(map(str, [ROOT / "src", *sorted((ROOT / "packages").glob("*/src"))]))
"""A PYTHONPATH for interpreters that have the entry points: .venv and what adds to it."""


def uninstalled(folder: Path) -> str:
    """Return a PYTHONPATH for other interpreters; writes entry points into the folder."""
    command = [sys.executable, str(ROOT / "scripts" / "entry_points.py"), str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
