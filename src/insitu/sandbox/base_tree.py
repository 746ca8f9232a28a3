"""The tree a task starts from: its files, over what its image and setup commands leave in the work folder.

A fresh sandbox finds it, once per image, setup and files; an LRU cache keeps the trees.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from insitu.errors import PolicyUnsupported, SandboxStartError, boundary
from insitu.sandbox.base import ExecResult, Sandbox, SandboxBackend, SandboxSpec, SupportsRootSetup
from insitu.types import Setup, Task, Tree

MAX_FILES = 200_000
MAX_BYTES = 512 << 20


@runtime_checkable
class ResolvesImages(Protocol):
    """A backend that resolves image references."""

    async def image_digest(self, image: str) -> str:
        """Return a name with a digest, a content id, or `image` itself. Raises SandboxStartError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseTree:
    """The tree a task starts from."""

    files: Tree = field(repr=False)
    image: str = ""
    """The image, with its digest where known; empty = the plain sandbox."""


def is_plain(setup: Setup) -> bool:
    """Return whether a sandbox holds only the task's files."""
    return not (setup.image or setup.commands or setup.root_commands or setup.roots)


class BaseTrees:
    """Cached base trees; safe to call concurrently."""

    def __init__(self, backend: SandboxBackend, *, cache_bytes: int = 1 << 30) -> None:
        """`cache_bytes` bounds the cache; the newest tree is always kept."""
        self._backend, self._budget = backend, cache_bytes
        self._known: OrderedDict[str, tuple[_BaseTree, int]] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, task: Task) -> _BaseTree:
        """Return the tree. Raises SandboxError, also when a setup command fails."""
        if is_plain(task.setup):
            return _BaseTree(files=task.files)
        key = await self._key(task)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._known:
                found = _BaseTree(files=await self._capture(task), image=await self._image(task.setup))
                size = sum(len(entry.content) for entry in found.files.values())
                self._known[key] = found, size
            self._known.move_to_end(key)
            found, _ = self._known[key]
            self._evict()
        return found

    def _evict(self) -> None:
        while len(self._known) > 1 and sum(size for _, size in self._known.values()) > self._budget:
            key, _ = self._known.popitem(last=False)
            if not self._locks[key].locked():
                del self._locks[key]

    async def _image(self, setup: Setup) -> str:
        if not setup.image or not isinstance(self._backend, ResolvesImages):
            return setup.image
        digest = await self._backend.image_digest(setup.image)
        return digest if "@" in digest or digest == setup.image else f"{setup.image}@{digest}"

    async def _key(self, task: Task) -> str:
        h = hashlib.sha256(repr((await self._image(task.setup), task.setup)).encode())
        for path in sorted(task.files):
            entry = task.files[path]
            h.update(ascii((path, entry.executable, len(entry.content))).encode() + entry.content)
        return h.hexdigest()

    async def _capture(self, task: Task) -> Tree:
        spec = SandboxSpec.of(task.setup, network="none", label=f"base/{task.id}")
        async with await self._backend.create(spec) as sandbox:
            await set_up(sandbox, task.setup)
            if task.files:
                await sandbox.lay(task.files)
            return await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)


async def set_up(
    sandbox: Sandbox, setup: Setup, note: Callable[[ExecResult], None] = lambda done: None
) -> None:
    """Run a task's setup commands in its work folder, those of root first; `note` gets each result.

    Raises SandboxError when one fails.
    """
    deadline = time.monotonic() + setup.timeout_s
    if setup.root_commands:
        if not isinstance(sandbox, SupportsRootSetup):
            raise PolicyUnsupported("this sandbox has no root to set it up")
        await _run(sandbox.exec_as_root, "root setup", setup.root_commands, deadline, note)
        await sandbox.end_root()
    await _run(sandbox.exec, "setup", setup.commands, deadline, note)


async def _run(
    execute: Callable[..., Awaitable[ExecResult]],
    what: str,
    commands: Sequence[str],
    deadline: float,
    note: Callable[[ExecResult], None],
) -> None:
    for number, command in enumerate(commands, 1):
        with boundary(SandboxStartError, f"{what} command {number}"):
            done = await execute(["/bin/sh", "-c", command], timeout_s=max(0.1, deadline - time.monotonic()))
        note(done)
        if done.exit_code != 0:
            how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
            lines = (done.stderr or done.stdout).decode("utf-8", "replace").split("\n")
            last = next((ascii(line.strip())[1:-1] for line in reversed(lines) if line.strip()), "no output")
            raise SandboxStartError(f"{what} command {number} {how}: {last[:200]}")
