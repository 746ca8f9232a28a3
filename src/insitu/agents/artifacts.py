"""Collection of an agent run's files, and attribution of sandbox failures.

A sandbox failure during or right after an agent run is attributed to the agent, which can exhaust memory,
processes and disk, unless the host shows to be the cause (sandbox/host_faults.py) or a control sandbox fails
too. Otherwise an agent could get bad rollouts excluded by breaking its sandbox.
"""

from __future__ import annotations

import contextlib
import posixpath
from dataclasses import dataclass, replace
from typing import AnyStr

from insitu.config import Config
from insitu.errors import SandboxError, SandboxLost
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec, control_sandbox
from insitu.sandbox.base_tree import MAX_FILES
from insitu.sandbox.host_faults import host_fault
from insitu.types import Tree

AGENT_MEMORY_BYTES = 1 << 30
"""Memory limit of one process in an agent's sandbox; Pi itself uses less than a tenth."""
AGENT_PROCESSES = 256
IMAGE_TREE_BYTES = 512 << 20
"""Size limit of a work folder that comes from an image, including version control."""
OVER_CAPS = "the work folder exceeds its size limits"
CONTROL_S = 30.0
"""Timeout of the command in a control sandbox; its start has the backend's own timeout."""


LIST_S = 20.0
LIST_BYTES = 64 << 10
LINK_BYTES = 1 << 20
MAX_LINKS = 8
"""Most links in a row that are followed."""


def redact(text: AnyStr, secret: str) -> AnyStr:
    """Replace the session secret with `***` in stored text."""
    if not secret:
        return text
    if isinstance(text, bytes):
        return text.replace(secret.encode(), b"***")
    return text.replace(secret, "***")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """Declared files that are collected from a sandbox in addition to the diff, within limits."""

    paths: tuple[str, ...] = ()
    """Files, or folders with all regular files below them; relative paths are in the work folder."""
    max_files: int = 64
    max_bytes: int = 4 << 20
    """Total size; files that do not fit into the rest are skipped."""

    async def collect(self, sandbox: Sandbox) -> dict[str, bytes]:
        """Return content by path inside the sandbox; symlinks are not followed.

        Raises SandboxError.
        """
        found: dict[str, bytes] = {}
        remaining = self.max_bytes
        for path in await self._listed(sandbox):
            if len(found) == self.max_files:
                break
            content = None
            with contextlib.suppress(SandboxError):  # too large or unreadable
                content = await sandbox.get(path, max_bytes=remaining)
            if content is not None:
                found[path] = content
                remaining -= len(content)
        return found

    async def _listed(self, sandbox: Sandbox) -> list[str]:
        if not self.paths:
            return []
        paths = [path if path.startswith("/") else f"{sandbox.workdir}/{path}" for path in self.paths]
        command = ["find", *paths, "-xdev", "-type", "f", "-print0"]
        done = await sandbox.exec(command, timeout_s=LIST_S, max_output_bytes=LIST_BYTES)
        names = done.stdout.split(b"\0")[:-1]
        return sorted({name.decode("utf-8", "surrogateescape") for name in names})


NOTHING = Artifacts()


def artifacts_from_config(config: Config) -> Artifacts:
    """Return what [harness] asks for."""
    return Artifacts(paths=config.harness.artifacts)


async def collect_tree(
    sandbox: Sandbox, backend: SandboxBackend, spec: SandboxSpec, *, plain: bool = True, stop: bool = True
) -> tuple[Tree, str]:
    """Kill all processes of the sandbox, with `stop`, and return (work folder, "").

    Returns ({}, reason) when the agent made that impossible. `plain`: the work folder initially contained
    only the task's files, nothing from an image or setup. Raises SandboxError for host failures.
    """
    try:
        if stop:
            await sandbox.kill_all()
        if plain:
            return await sandbox.get_tree(), ""
        return await sandbox.get_tree(max_bytes=IMAGE_TREE_BYTES, max_files=MAX_FILES), ""
    except SandboxError as error:
        if not error.infra:
            return {}, OVER_CAPS
        return {}, await attribute_loss(error, backend, spec, sandbox)


async def follow_links(sandbox: Sandbox, base: Tree, tree: Tree) -> Tree:
    """Return the work folder with files in place of links that replace files of `base`.

    Only links to files of the work folder are followed, by a chain of at most MAX_LINKS. Raises SandboxError.
    """
    gone = [path for path in base if path not in tree]
    if not gone:
        return tree
    command = ["find", ".", "-xdev", "-type", "l", "-printf", "%P\\0%l\\0"]
    done = await sandbox.exec(command, timeout_s=LIST_S, max_output_bytes=LINK_BYTES)
    words = done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    links = dict(zip(words[::2], words[1::2], strict=False))
    found = dict(tree)
    for path in gone:
        end = path
        for _ in range(MAX_LINKS):
            if end not in links or end in tree:
                break
            # An absolute link stays absolute, and is none of the tree's unless it leads into it.
            whole = posixpath.join(sandbox.workdir, posixpath.dirname(end), links[end])
            end = posixpath.normpath(whole).removeprefix(f"{sandbox.workdir}/")
        if end in tree:
            found[path] = tree[end]
    return found


async def attribute_loss(
    error: SandboxError, backend: SandboxBackend, spec: SandboxSpec, lost: Sandbox | None = None
) -> str:
    """Return a description of how the agent lost its sandbox, which is closed.

    Raises SandboxError when the host shows to be the cause, or a control sandbox of the backend fails too.
    """
    if fault := await host_fault(lost):
        raise SandboxLost(f"{error}: {fault}") from error
    if lost is not None:
        await lost.close()  # what still runs in it must not slow the control sandbox down
    try:
        async with await control_sandbox(backend, replace(spec, files={}), lost) as control:
            works = (await control.exec(["true"], timeout_s=CONTROL_S)).exit_code == 0
    except SandboxError:
        works = False
    if not works:
        raise error
    how = "was lost" if isinstance(error, SandboxLost) else "failed"
    return f"the sandbox {how} while the agent ran: {error}"
