"""What this process needs of its own limits to hold many sandboxes, and the users that these run as.
Callers: the backends."""

from __future__ import annotations

import os
import resource
import secrets
from pathlib import Path

OPEN_FILES = 65536
NOBODY = 65534
FIRST_USER, USERS = 0x70000000, 1 << 26
"""Numbers that neither people nor services nor containers are given."""


def allow_open_files() -> None:
    """Raise this process's limit: every sandbox takes some fifteen descriptors, and 1024 is the usual
    default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def has_own_users() -> bool:
    """Whether each sandbox can run as a user of its own: root can give it any number, but in some
    containers."""
    return os.geteuid() == 0 and all(_mapped(kind) for kind in ("uid", "gid"))


def _mapped(kind: str) -> bool:
    """Whether this process's user namespace has the numbers."""
    for row in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        first, _, count = (int(part) for part in row.split())
        if first <= FIRST_USER and first + count >= FIRST_USER + USERS:
            return True
    return False


def a_user() -> int:
    """The user of a new sandbox, so that what the kernel counts by user is counted by sandbox. Drawn, since
    nobody knows of all sandboxes of a machine; two with the same number share a limit and nothing else."""
    return FIRST_USER + secrets.randbelow(USERS)
