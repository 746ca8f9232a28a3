"""Files and folders written whole or not at all, and the end of a log."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from insitu.storage.metrics import disk_error


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_lines(log: Path, since: int = 0) -> str:
    """Return the last lines of a process's log in one, empty without any; `since`: size before its start."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - 4000))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip()[-600:] for line in lines[-6:])


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file atomically and durably; `private` sets mode 0600.

    Raises RecordError, with a separate message for a full disk.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, UnicodeError) as error:
        raise disk_error(path, error) from error


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give a new folder beside `folder` to write into, which then takes its place."""
    fresh = folder.with_name(f".{folder.name}.new")
    for old in (fresh, folder):
        shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    fresh.rename(folder)
