"""Cache folder and temporary folders of insitu.

Temporary folders (with short paths, for sockets) and incomplete cache folders are named after their process
and locked by it, so that those of killed processes are detected and removed at the next start.
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
"""Longest temporary folder that leaves room for socket paths below it: these have 108 bytes at most."""
_NAME = re.compile(r"(?:insitu|.*\.part)-(\d+)-\w+")


def socket_parent() -> Path:
    """Return the system's temporary folder, or /tmp when that path is too long for a unix socket."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= SOCKET_PARENT_BYTES else Path("/tmp")


def scratch_folder() -> contextlib.AbstractContextManager[Path]:
    """Create a temporary folder that is removed on exit."""
    return _locked_folder(socket_parent(), "insitu")


def part_folder(target: Path) -> contextlib.AbstractContextManager[Path]:
    """Create a temporary folder next to `target`, to be renamed to it when complete.

    Removed on exit unless it was renamed.
    """
    return _locked_folder(target.parent, f"{target.name}.part")


def keep(part: Path, folder: Path) -> None:
    """Rename a complete folder; what another process has put there before stays. Raises OSError."""
    try:
        part.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextlib.contextmanager
def _locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_scratch() -> None:
    """Remove the temporary folders of processes that ended; errors are ignored."""
    _remove_stale(socket_parent(), "insitu-*")


def remove_stale_parts(parent: Path) -> None:
    """Remove folders that `part_folder` created in `parent` for processes that ended; errors are ignored."""
    _remove_stale(parent, "*.part-*")


def _remove_stale(parent: Path, pattern: str) -> None:
    for folder in parent.glob(pattern):
        match = _NAME.fullmatch(folder.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # The pid may belong to a process of another container: only the lock is reliable.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def cache_folder() -> Path:
    """Return the cache folder: $INSITU_CACHE or ~/.cache/insitu.

    Raises SetupError for a user without a home folder.
    """
    named = os.environ.get("INSITU_CACHE", "")
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "insitu"
    except RuntimeError as error:
        raise SetupError(
            "this user has no home folder: set INSITU_CACHE to a folder for insitu's cache"
        ) from error
