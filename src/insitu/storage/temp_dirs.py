"""Where insitu keeps what is not a run: its cache, and short-lived folders for sockets (short paths).

A short-lived folder, and one in the cache that is still being made, is named after its process and locked by
it, so that what a killed process left is known for what it is and removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from insitu.errors import SetupError

SOCKET_PARENT_BYTES = 60
"""Longest temporary folder that leaves room for sockets below it: their addresses have 108 bytes at most."""
_NAME = re.compile(r"(?:insitu|.*\.part)-(\d+)-\w+")


def socket_parent() -> Path:
    """Return the system's temporary folder, or /tmp where that path is too long for a unix socket."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= SOCKET_PARENT_BYTES else Path("/tmp")


def scratch_folder() -> contextlib.AbstractContextManager[Path]:
    """A fresh folder, removed at the end."""
    return _fresh(socket_parent(), "insitu")


def part_folder(whole: Path) -> contextlib.AbstractContextManager[Path]:
    """A fresh folder beside `whole`, removed at the end unless it was renamed: what is made in it gets its
    name once it is complete."""
    return _fresh(whole.parent, f"{whole.name}.part")


@contextlib.contextmanager
def _fresh(parent: Path, prefix: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_scratch() -> None:
    """Remove the scratch folders of processes that are gone. What cannot be removed stays."""
    _remove_stale(socket_parent(), "insitu-*")


def remove_stale_parts(parent: Path) -> None:
    """The same for what `part_folder` made in `parent`."""
    _remove_stale(parent, "*.part-*")


def _remove_stale(parent: Path, pattern: str) -> None:
    for folder in parent.glob(pattern):
        match = _NAME.fullmatch(folder.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # A process of another container may have this number: only the lock is sure.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def cache_folder() -> Path:
    """Raises SetupError for a user without a home folder."""
    named = os.environ.get("INSITU_CACHE", "")
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "insitu"
    except RuntimeError as error:
        raise SetupError(
            "this user has no home folder: set INSITU_CACHE to a folder for insitu's cache"
        ) from error
