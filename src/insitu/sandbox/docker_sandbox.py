"""A live docker sandbox: ends when its container is gone. Made by docker.DockerBackend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence

from insitu.errors import BackendTimeout, SandboxError, boundary
from insitu.sandbox import tree
from insitu.sandbox.base import ExecResult, Owner, SandboxSpec
from insitu.sandbox.cgroup import OomCounter
from insitu.sandbox.control_channel import Control
from insitu.sandbox.docker_cli import Cli, says_daemon_gone
from insitu.sandbox.supervised_sandbox import SupervisedSandbox

REMOVE_S = 30.0
GONE_S = 1.0
LATE_S = 20.0
"""After which a container is looked for that a slow daemon may have made when nobody waited any more."""
_ROOT = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
_late: set[asyncio.Task[None]] = set()
log = logging.getLogger(__name__)


class DockerSandbox(SupervisedSandbox):
    """A live sandbox; implements insitu.sandbox.base.Sandbox. One with an image of the task keeps what the
    image holds in the work folder, and cannot be wiped: the rest of the image may have been written to."""

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
    ) -> None:
        super().__init__(spec, control, places=places, env=env, owner=-1)
        self._container = container
        self._cli = cli
        self._kills = kills
        self._removed = False

    def memory_kills(self) -> int:
        return self._kills.count()

    async def _fill(self) -> None:
        # The daemon may map users: what counts is the number that the sandbox's home has on this side.
        if os.geteuid() == 0:
            self._owner = os.fstat(self._folders[self._places[1]]).st_uid
        if not self._spec.image:
            await super()._fill()
            return
        if not self._spec.root_setup:
            await self._give()
        if self._spec.files:
            await self.lay(self._spec.files)

    async def _give(self) -> None:
        with boundary(SandboxError, "give the work folder to the sandbox"):
            await asyncio.to_thread(tree.give, self._work(), self._owner)

    async def exec_as_root(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Implements insitu.sandbox.base.SupportsRootSetup."""
        return await self._exec("root", argv, timeout_s=timeout_s, env=_ROOT)

    async def end_root(self) -> None:
        await self._control.order("user")
        await self._give()

    def _owner_id(self, owner: Owner) -> int:
        return tree.KEEPER if owner == "root" and self._owner == 0 else super()._owner_id(owner)

    async def wipe(self) -> None:
        if self._spec.image:
            raise SandboxError("a sandbox of an image cannot be wiped; make a new one")
        await super().wipe()

    async def _close(self) -> None:
        self._kills.close()
        # Before PID 1 learns of it: a container that ends by itself is removed by the daemon meanwhile, and
        # then it takes two calls to be sure.
        await self._end()
        await super()._close()

    async def _end(self) -> None:
        if self._removed:
            return
        self._removed = True
        try:
            await remove(self._cli, self._container)
        except SandboxError as error:
            log.warning("a sandbox is left to the reaper container=%s error=%s", self._container, error)


async def remove(cli: Cli, container: str) -> None:
    """Returns once it is gone. The daemon removes a container that ended by itself: both at once is no error.

    Raises SandboxError when it is still there after REMOVE_S, or the daemon not back after GONE_S: a daemon
    that starts again removes those whose PID 1 has ended.
    """
    began = time.monotonic()
    while True:
        code, _, err = await cli.run(["rm", "-f", "-v", container], timeout_s=REMOVE_S)
        text = err.decode("utf-8", "replace").lower()
        if code == 0 or "no such container" in text:
            return
        if time.monotonic() - began > (GONE_S if says_daemon_gone(err) else REMOVE_S):
            raise SandboxError(f"cannot remove container {container}: {text.strip()[:200]}")
        await asyncio.sleep(0.05)


async def remove_after(cli: Cli, container: str, error: BaseException) -> None:
    """Undo a start that failed, which may have made no container, or will make one only later. Never raises:
    what is left, the reaper takes."""
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
