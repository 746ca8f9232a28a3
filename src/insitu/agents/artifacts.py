"""What an agent run left behind, and who is to blame when that cannot be had.

A sandbox that fails while its agent runs, or right after, failed by the agent's doing (it can use up memory,
processes and disk, and it can kill what is in its sandbox) unless a control sandbox shows that sandboxes do
not work at all just now. Otherwise an agent could have its bad rollouts masked by breaking its sandbox.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import AnyStr

from insitu.errors import SandboxError, SandboxLost
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec, control_sandbox
from insitu.sandbox.base_tree import MAX_FILES
from insitu.types import Tree

AGENT_MEMORY_BYTES = 1 << 30
"""Of one process in an agent's sandbox; Pi itself uses less than a tenth."""
AGENT_PROCESSES = 256
IMAGE_TREE_BYTES = 512 << 20
"""Cap of a work folder that an image fills, version control and all."""
OVER_CAPS = "the work folder is over its caps"
CONTROL_S = 30.0
"""Of the command in a control sandbox; its start takes what the backend allows every start."""


LIST_S = 20.0
LIST_BYTES = 64 << 10


def redact(text: AnyStr, secret: str) -> AnyStr:
    """Whatever leaves a sandbox to be kept passes here."""
    if not secret:
        return text
    if isinstance(text, bytes):
        return text.replace(secret.encode(), b"***")
    return text.replace(secret, "***")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """What of a sandbox is kept beside the diff: declared places only, and only so much."""

    paths: tuple[str, ...] = ()
    """Files, or folders with all regular files below, inside the work folder or the home. One that does not
    start with "/" is in the work folder."""
    max_files: int = 64
    max_bytes: int = 4 << 20
    """Of all together; a file that does not fit into what is left is left out."""

    async def collect(self, sandbox: Sandbox) -> dict[str, bytes]:
        """Content by inside path, no link followed. Raises SandboxError."""
        found: dict[str, bytes] = {}
        left = self.max_bytes
        for path in await self._listed(sandbox):
            if len(found) == self.max_files:
                break
            content = None
            with contextlib.suppress(SandboxError):  # too large, or in a place that is nobody's to read
                content = await sandbox.get(path, max_bytes=left)
            if content is not None:
                found[path] = content
                left -= len(content)
        return found

    async def _listed(self, sandbox: Sandbox) -> list[str]:
        if not self.paths:
            return []
        places = [path if path.startswith("/") else f"{sandbox.workdir}/{path}" for path in self.paths]
        command = ["find", *places, "-xdev", "-type", "f", "-print0"]
        done = await sandbox.exec(command, timeout_s=LIST_S, max_output_bytes=LIST_BYTES)
        names = done.stdout.split(b"\0")[:-1]
        return sorted({name.decode("utf-8", "surrogateescape") for name in names})


NOTHING = Artifacts()


def bounded(spec: SandboxSpec, backend: SandboxBackend) -> SandboxSpec:
    """`spec` with an agent's limits, where the backend can keep them."""
    if "resource_limits" not in backend.capabilities:
        return spec
    return replace(spec, memory_bytes=AGENT_MEMORY_BYTES, max_processes=AGENT_PROCESSES)


async def collect_tree(
    sandbox: Sandbox, backend: SandboxBackend, spec: SandboxSpec, *, plain: bool = True
) -> tuple[Tree, str]:
    """Stop everything in the sandbox and take its work folder; ({}, why) when the agent made that impossible.
    `plain`: at the start it held the task's files only, not what an image or a setup has put there.

    Raises SandboxError when it was the host.
    """
    try:
        await sandbox.kill_all()
        if plain:
            return await sandbox.get_tree(), ""
        return await sandbox.get_tree(max_bytes=IMAGE_TREE_BYTES, max_files=MAX_FILES), ""
    except SandboxError as error:
        if not error.infra:
            return {}, OVER_CAPS
        return {}, await attribute_loss(error, backend, spec, sandbox)


async def attribute_loss(
    error: SandboxError, backend: SandboxBackend, spec: SandboxSpec, lost: Sandbox | None = None
) -> str:
    """How the agent lost its sandbox; raises `error` again when a control sandbox of the backend that made
    `lost` does not work either."""
    try:
        async with await control_sandbox(backend, replace(spec, files={}), lost) as control:
            works = (await control.exec(["true"], timeout_s=CONTROL_S)).exit_code == 0
    except SandboxError:
        works = False
    if not works:
        raise error
    how = "was lost" if isinstance(error, SandboxLost) else "failed"
    return f"the sandbox {how} while the agent ran: {error}"
