"""Memory of this machine. No torch."""

from __future__ import annotations

import os


def available_memory() -> int:
    """Return the available bytes of host memory (Linux), or all of it where that is unknown."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
