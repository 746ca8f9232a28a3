"""Registry of images built from a task folder's Dockerfile, named by a hash of the folder's content.

Identical content has the same name and is built once; a changed file results in a new name and a new task.
The cache holds a symlink to the folder, not a copy.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from insitu.errors import RecordError, boundary
from insitu.storage.temp_dirs import cache_folder

REPOSITORY = "insitu-build"
MAX_CONTEXT_FILES = 20_000
MAX_CONTEXT_BYTES = 1 << 30
_CHUNK = 1 << 20
OTHER = "--"
"""Between the digest and the name of a Dockerfile that is not the usual one."""
_FILE = re.compile(r"\w[\w.-]{0,60}", re.ASCII)


def register_build(context: Path, dockerfile: str = "Dockerfile") -> str:
    """Register a build context, a folder with a Dockerfile, and return the name of its image.

    Raises RecordError, also for a name of a Dockerfile that no image can have in its own.
    """
    if not _FILE.fullmatch(dockerfile):
        raise RecordError(f"{ascii(dockerfile)[:60]}: a Dockerfile lies in its context and has a plain name")
    other = "" if dockerfile == "Dockerfile" else f"{OTHER}{dockerfile}"
    reference = f"{REPOSITORY}:{context_digest(context)}{other}"
    link = _link(reference)
    with boundary(RecordError, f"register the image of {context}"):
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = link.with_name(f"{link.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(context.resolve())
        temporary.replace(link)
    return reference


def build_context(reference: str) -> Path | None:
    """Return the registered folder of an image; None for an image that is not built here.

    Raises RecordError when the folder is missing or has changed.
    """
    if not reference.startswith(f"{REPOSITORY}:"):
        return None
    link = _link(reference)
    if not link.is_dir():
        raise RecordError(f"image {reference}: the task folder it is built from no longer exists")
    folder = link.resolve()
    if f"{REPOSITORY}:{context_digest(folder)}" != reference.partition(OTHER)[0]:
        raise RecordError(f"image {reference}: {folder} changed since the task was loaded")
    return folder


def dockerfile_of(reference: str) -> str:
    """Return the name of the Dockerfile of a registered image."""
    return reference.partition(OTHER)[2] or "Dockerfile"


def _link(reference: str) -> Path:
    return cache_folder() / "builds" / reference.rpartition(":")[2].partition(OTHER)[0]


def context_digest(folder: Path) -> str:
    """Hash every path, mode and content of a build context (32 hex digits).

    Raises RecordError when the context is too large.
    """
    digest = hashlib.sha256()
    remaining = MAX_CONTEXT_BYTES
    with boundary(RecordError, f"read {folder}"):
        paths = sorted(folder.rglob("*"))
        if len(paths) > MAX_CONTEXT_FILES:
            raise RecordError(f"{folder} has more than {MAX_CONTEXT_FILES} files")
        for path in paths:
            status = path.lstat()
            name = path.relative_to(folder).as_posix()
            remaining -= status.st_size if stat.S_ISREG(status.st_mode) else 0
            if remaining < 0:
                raise RecordError(f"{folder} has more than {MAX_CONTEXT_BYTES >> 20} MiB")
            digest.update(f"{name!a} {status.st_mode:o}\n".encode())
            if stat.S_ISLNK(status.st_mode):
                digest.update(ascii(str(path.readlink())).encode())
            elif stat.S_ISREG(status.st_mode):
                digest.update(f"{status.st_size}\n".encode())
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
    return digest.hexdigest()[:32]
