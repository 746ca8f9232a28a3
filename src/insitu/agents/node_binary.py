"""The program of Pi's Node as a copy in the cache that can be run and not read.

    node-DIGEST         the copy; DIGEST begins the SHA-256 of its content, so that one Node is there once,
                        wherever it lies and however often its environment is made anew
    node-DIGEST.lock    held for as long as a process of insitu may start sandboxes with it
    node-contents.json  path, size and time of change -> DIGEST: 120 MB are hashed once, not at every start

A copy that nobody holds and that was not asked for in a week is removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from insitu.errors import SetupError
from insitu.storage.temp_dirs import cache_folder, part_folder, remove_stale_parts

UNUSED_S = 7 * 86400.0
_COPY = re.compile(r"node-[0-9a-f]{16}")
_CONTENTS = "node-contents.json"
_REMEMBERED = 32
_held: dict[Path, int] = {}
"""Lock of each copy that this process may use, until it ends."""


def sealed_node(node: Path) -> Path:
    """A copy of `node` in the cache that can be run and not read.

    The kernel guards the memory and the open files of a process whose program cannot be read against every
    other process, also of the same user. So nothing that an agent runs can get into the agent, which in warm
    mode serves other rollouts later. It must be a copy: a link would take the right to read from the Node
    that it links to. Raises SetupError.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        sealed = cache / f"node-{_digest(node, cache)}"
        # A cache that somebody else made, and that we may only read, does as well.
        with contextlib.suppress(OSError):
            _hold(sealed)
        if not sealed.exists():
            _copy(node, sealed)
    except OSError as error:
        raise SetupError(f"copy {node} to {cache}: {error.strerror or error}") from error
    with contextlib.suppress(OSError):
        _prune(cache)
    return sealed


def _digest(node: Path, cache: Path) -> str:
    """Of its content, looked up where the file is the one that was hashed before."""
    status = node.stat()
    key = f"{node}:{status.st_size}:{status.st_ctime_ns}"
    known = _known(cache)
    if key not in known:
        with node.open("rb") as file:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        with contextlib.suppress(OSError), part_folder(cache / _CONTENTS) as aside:
            fresh = aside / "contents"
            fresh.write_text(json.dumps(dict(list(known.items())[-_REMEMBERED:])), encoding="utf-8")
            fresh.rename(cache / _CONTENTS)
    return known[key]


def _known(cache: Path) -> dict[str, str]:
    try:
        known = json.loads((cache / _CONTENTS).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: text for key, text in known.items() if _COPY.fullmatch(f"node-{text}")}


def _copy(node: Path, sealed: Path) -> None:
    with part_folder(sealed) as aside:
        fresh = aside / "node"
        shutil.copyfile(node, fresh)
        fresh.chmod(0o111)
        fresh.rename(sealed)


def _hold(sealed: Path) -> None:
    """Say that this process uses it, now and until it ends."""
    if sealed not in _held:
        _held[sealed] = _locked(sealed, fcntl.LOCK_SH)
    if sealed.exists():
        os.utime(sealed)


def _locked(sealed: Path, how: int) -> int:
    """The descriptor that holds the lock, which is removed with its copy: then the one that came after it."""
    path = sealed.with_name(f"{sealed.name}.lock")
    while True:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, how)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _prune(cache: Path) -> None:
    """Remove the copies that nobody uses, and what a killed process left of one."""
    remove_stale_parts(cache)
    for sealed in cache.glob("node-*"):
        with contextlib.suppress(OSError):
            if not _COPY.fullmatch(sealed.name) or not _unused(sealed):
                continue
            lock = _locked(sealed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if _unused(sealed):
                    sealed.unlink()
                    sealed.with_name(f"{sealed.name}.lock").unlink()
            finally:
                os.close(lock)


def _unused(sealed: Path) -> bool:
    return sealed.stat().st_mtime < time.time() - UNUSED_S
