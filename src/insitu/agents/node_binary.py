"""Cached copies of the agents' Node binary that are executable but not readable.

    node-DIGEST       the copy; DIGEST is one of its content, so identical binaries share one copy
    node-DIGEST.lock  locked while a process of insitu may start sandboxes with it

Copies that are not locked and were not used for a week are removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from pathlib import Path

from insitu.errors import SetupError
from insitu.storage.temp_dirs import cache_folder, part_folder, remove_stale_parts

UNUSED_S = 7 * 86400.0
_COPY = re.compile(r"node-[0-9a-f]{16}")
_READ_BYTES = 1 << 20
_lock_fds: dict[Path, int] = {}
"""Descriptor of the lock of each copy that this process may use, until it ends."""


def sealed_node(node: Path) -> Path:
    """Return an executable but unreadable copy of `node` in the cache.

    Raises SetupError.
    """
    # The kernel protects the memory and open files of a process with an unreadable program against all other
    # processes of the same user. So commands of an agent cannot manipulate the agent itself, which in warm
    # mode serves other rollouts later. A hard link would change the mode of the original file.
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        sealed = cache / f"node-{_digest(node)}"
        with contextlib.suppress(OSError):  # The cache may be read-only for this user.
            _lock_copy(sealed)
        if not sealed.exists():
            _copy(node, sealed)
    except OSError as error:
        raise SetupError(f"copy {node} to {cache}: {error.strerror or error}") from error
    with contextlib.suppress(OSError):
        _prune(cache)
    return sealed


def _digest(node: Path) -> str:
    """Return a digest of size, head and tail: all 120 MB would be read at each start."""
    with node.open("rb") as file:
        head = file.read(_READ_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _READ_BYTES))
        return hashlib.sha256(b"%d " % size + head + file.read()).hexdigest()[:16]


def _copy(node: Path, sealed: Path) -> None:
    with part_folder(sealed) as part:
        copy = part / "node"
        shutil.copyfile(node, copy)
        copy.chmod(0o111)
        copy.rename(sealed)


def _lock_copy(sealed: Path) -> None:
    """Mark the copy as used by this process until it ends."""
    if sealed not in _lock_fds:
        _lock_fds[sealed] = _open_lock(sealed, fcntl.LOCK_SH)
    if sealed.exists():
        os.utime(sealed)


def _open_lock(sealed: Path, operation: int) -> int:
    """Return a descriptor with the lock; retries when the lock file was removed together with its copy."""
    path = sealed.with_name(f"{sealed.name}.lock")
    while True:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, operation)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _prune(cache: Path) -> None:
    """Remove unused copies and incomplete ones of killed processes."""
    remove_stale_parts(cache)
    for sealed in cache.glob("node-*"):
        with contextlib.suppress(OSError):
            if not _COPY.fullmatch(sealed.name) or not _unused(sealed):
                continue
            lock = _open_lock(sealed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if _unused(sealed):
                    sealed.unlink()
                    sealed.with_name(f"{sealed.name}.lock").unlink()
            finally:
                os.close(lock)


def _unused(sealed: Path) -> bool:
    return sealed.stat().st_mtime < time.time() - UNUSED_S
