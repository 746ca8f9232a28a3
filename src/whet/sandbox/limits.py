"""What this process needs of its own limits to hold many boxes. Callers: the backends."""

from __future__ import annotations

import resource

OPEN_FILES = 65536


def allow_open_files() -> None:
    """Raise this process's limit: every box takes some fifteen descriptors, and 1024 is the usual default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
