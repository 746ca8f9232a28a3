"""Images that are built from a task folder's Dockerfile, under a name made of the folder's content.

The loader of tasks registers the build context, whoever makes sandboxes looks it up by the image's name and
builds what is missing. The same content has the same name, so it is built once; a changed file gives another
name, and with it another task. What the cache holds is a link to the folder, not a copy of it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from insitu.errors import RecordError, boundary
from insitu.storage.temp_dirs import cache_folder

REPOSITORY = "insitu-build"
MAX_CONTEXT_FILES = 20_000
MAX_CONTEXT_BYTES = 1 << 30
_CHUNK = 1 << 20


def register_build(context: Path) -> str:
    """The name of the image that `context` (a folder with a Dockerfile) builds. Raises RecordError."""
    reference = f"{REPOSITORY}:{context_digest(context)}"
    link = _link(reference)
    with boundary(RecordError, f"register the image of {context}"):
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f"{link.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(context.resolve())
        fresh.replace(link)
    return reference


def build_context(reference: str) -> Path | None:
    """The registered folder of an image's name; None for an image that is not built here. Raises RecordError
    when the folder is gone or holds something else by now."""
    if not reference.startswith(f"{REPOSITORY}:"):
        return None
    link = _link(reference)
    if not (link / "Dockerfile").is_file():
        raise RecordError(f"image {reference}: the task folder it is built from is gone")
    folder = link.resolve()
    if f"{REPOSITORY}:{context_digest(folder)}" != reference:
        raise RecordError(f"image {reference}: {folder} changed since the task was loaded")
    return folder


def _link(reference: str) -> Path:
    return cache_folder() / "builds" / reference.rpartition(":")[2]


def context_digest(folder: Path) -> str:
    """Names every path, mode and content of a build context. Raises RecordError for one that is too large."""
    whole = hashlib.sha256()
    left = MAX_CONTEXT_BYTES
    with boundary(RecordError, f"read {folder}"):
        paths = sorted(folder.rglob("*"))
        if len(paths) > MAX_CONTEXT_FILES:
            raise RecordError(f"{folder} has more than {MAX_CONTEXT_FILES} files")
        for path in paths:
            status = path.lstat()
            name = path.relative_to(folder).as_posix()
            left -= status.st_size if stat.S_ISREG(status.st_mode) else 0
            if left < 0:
                raise RecordError(f"{folder} has more than {MAX_CONTEXT_BYTES >> 20} MiB")
            whole.update(f"{name!a} {status.st_mode:o}\n".encode())
            if stat.S_ISLNK(status.st_mode):
                whole.update(ascii(str(path.readlink())).encode())
            elif stat.S_ISREG(status.st_mode):
                whole.update(f"{status.st_size}\n".encode())
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        whole.update(chunk)
    return whole.hexdigest()[:32]
