"""The limit of open files of this process, and the user ids of sandboxes."""

from __future__ import annotations

import os
import resource
import secrets
from pathlib import Path

OPEN_FILES = 65536
NOBODY_ID = 65534
FIRST_USER, USERS = 0x70000000, 1 << 26
"""User ids that neither people, services nor containers are given."""


def allow_open_files() -> None:
    """Raise the limit of open files: each sandbox needs some 15 descriptors, the usual default is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_root() -> bool:
    """Return whether this process is root and can become another user.

    In a user namespace of one user, root is an ordinary user's name for itself.
    """
    return _root_over(NOBODY_ID, 1)


def has_own_users() -> bool:
    """Return whether each sandbox can run as its own user: needs root, and the ids mapped in containers."""
    return _root_over(FIRST_USER, USERS)


def _root_over(least: int, users: int) -> bool:
    """Return whether this process is root in a user namespace that maps these ids."""
    return os.geteuid() == 0 and all(_mapped(kind, least, users) for kind in ("uid", "gid"))


def _mapped(kind: str, least: int, users: int) -> bool:
    for row in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        first, _, count = (int(part) for part in row.split())
        if first <= least and first + count >= least + users:
            return True
    return False


def a_user() -> int:
    """Draw the user id of a new sandbox, so that limits per user are limits per sandbox."""
    # Drawn, since no process has a list of all sandboxes of a machine. Two with the same id share their
    # limits.
    return FIRST_USER + secrets.randbelow(USERS)
