"""A live docker sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence

from insitu.errors import BackendTimeout, SandboxError
from insitu.sandbox import tree
from insitu.sandbox.base import ExecResult, Owner, Sandbox, SandboxSpec
from insitu.sandbox.cgroup import OomCounter
from insitu.sandbox.control_channel import Control
from insitu.sandbox.docker_cli import Cli, is_daemon_down
from insitu.sandbox.supervised_sandbox import SupervisedSandbox

REMOVE_S = 30.0
GONE_S = 1.0
LATE_S = 20.0
"""Delay of a second removal: a slow daemon may create the container after the caller gave up."""
_ROOT = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
_late: set[asyncio.Task[None]] = set()
log = logging.getLogger(__name__)


class Beside:
    """What runs beside a container: here nothing. The part `open_container` has others."""

    arguments: Sequence[str] = ("--network", "none")
    """Of `docker run`."""
    env: Mapping[str, str] = {}
    """Variables of the container's processes."""

    async def open(self) -> None:
        """Start it, before the container. Raises SandboxError; the caller closes."""

    async def ready(self, sandbox: Sandbox) -> None:
        """Wait until the sandbox is healthy. Raises SandboxError."""

    async def fault(self) -> str:
        """Return what of it ended too early; "" for nothing. Raises SandboxError."""
        return ""

    async def close(self) -> None:
        """Remove everything; idempotent. Never raises."""


class DockerSandbox(SupervisedSandbox):
    """Implements insitu.sandbox.base.Sandbox.

    A sandbox of a task's image keeps the image's work folder and cannot be wiped: its system is writable.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        control: Control,
        *,
        container: str,
        cli: Cli,
        places: Sequence[str],
        env: Mapping[str, str],
        kills: OomCounter,
        beside: Beside,
    ) -> None:
        super().__init__(spec, control, places=places, env=env, owner=-1, kills=kills)
        self._beside, self.fate.beside = beside, beside.fault
        self._container = container
        self._cli = cli
        self._removed = False

    async def _fill(self) -> None:
        # The daemon may map users: take the owner of the sandbox's home as seen from the host.
        if os.geteuid() == 0:
            self._owner = os.fstat(self._folders[self._places[1]]).st_uid
        if not self._spec.image:
            await super()._fill()
            return
        if not self._spec.root_setup:
            await self._chown_work()
        if self._spec.files:
            await self.lay(self._spec.files)

    async def _chown_work(self) -> None:
        for place in self._trees():
            await self._give(place)

    async def exec_as_root(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run a command as root; see SupportsRootSetup."""
        return await self._exec("root", argv, timeout_s=timeout_s, env=_ROOT)

    async def end_root(self) -> None:
        await self._control.order("user")
        await self._chown_work()

    def _owner_id(self, owner: Owner) -> int:
        return tree.KEEPER if owner == "root" and self._owner == 0 else super()._owner_id(owner)

    async def wipe(self) -> None:
        if self._spec.image:
            raise SandboxError("a sandbox of an image cannot be wiped; make a new one")
        await super().wipe()

    async def _close(self) -> None:
        self.fate.kills.close()
        # Before PID 1 ends: the daemon would remove the container at the same time, which takes a second
        # call.
        await self._end()
        await super()._close()

    async def _end(self) -> None:
        if self._removed:
            return
        self._removed = True
        try:
            await remove(self._cli, self._container)
        except SandboxError as error:
            log.warning("leaked container=%s error=%s", self._container, error)
        await self._beside.close()


async def remove(cli: Cli, container: str) -> None:
    """Remove a container, also one that the daemon removes at the same time.

    Raises SandboxError after REMOVE_S, or after GONE_S without a daemon: a restarted daemon removes
    containers whose PID 1 has ended.
    """
    began = time.monotonic()
    while True:
        code, _, err = await cli.run(["rm", "-f", "-v", container], timeout_s=REMOVE_S)
        text = err.decode("utf-8", "replace").lower()
        if code == 0 or "no such container" in text:
            return
        if time.monotonic() - began > (GONE_S if is_daemon_down(err) else REMOVE_S):
            raise SandboxError(f"cannot remove container {container}: {text.strip()[:200]}")
        await asyncio.sleep(0.05)


async def remove_after(cli: Cli, container: str, error: BaseException) -> None:
    """Remove the container of a failed start, now and, after a timeout, once more later. Never raises."""
    with contextlib.suppress(SandboxError):
        await remove(cli, container)
    if isinstance(error, BackendTimeout | asyncio.CancelledError):
        task = asyncio.get_running_loop().create_task(_remove_late(cli, container))
        _late.add(task)
        task.add_done_callback(_late.discard)


async def _remove_late(cli: Cli, container: str) -> None:
    await asyncio.sleep(LATE_S)
    with contextlib.suppress(SandboxError):
        await remove(cli, container)
