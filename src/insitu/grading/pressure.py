"""Stall time of this machine, from the kernel's pressure stall information (PSI)."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

PRESSURE = Path("/proc/pressure")


def pressure_s() -> float:
    """Return seconds in which a process stalled on CPU, memory or I/O; 0 without PSI."""
    total = 0
    for resource in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError):
            found = re.search(r"^some .*total=(\d+)", (PRESSURE / resource).read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total / 1e6
