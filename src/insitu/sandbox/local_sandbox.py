"""A live local sandbox: ends with the process that made its namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

from insitu.sandbox import rootfs as layout
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.cgroup import Cgroup
from insitu.sandbox.control_channel import Control, readable
from insitu.sandbox.supervised_sandbox import SupervisedSandbox

CLOSE_S = 5.0
KILLED_S = 1.0


class LocalSandbox(SupervisedSandbox):
    """Implements insitu.sandbox.base.Sandbox."""

    def __init__(
        self,
        spec: SandboxSpec,
        process: subprocess.Popen[bytes],
        control: Control,
        cgroup: Cgroup | None,
        user: int,
    ) -> None:
        super().__init__(
            spec,
            control,
            places=layout.writable(spec),
            env=layout.environment(spec),
            owner=user,
        )
        self._process = process
        self._cgroup = cgroup

    def memory_kills(self) -> int:
        return self._cgroup.kills.count() if self._cgroup else 0

    async def _end(self) -> None:
        try:
            if not await ended(self._process, CLOSE_S):
                self._kill()
                await ended(self._process, CLOSE_S)
        except asyncio.CancelledError:
            # The loop ends: reap the child here.
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)
            if self._cgroup:
                self._cgroup.try_remove()
            raise
        if self._cgroup:
            await self._cgroup.remove()

    def _kill(self) -> None:
        self._process.kill()
        if self._cgroup:
            self._cgroup.kill()


async def ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the outermost process, which ends after the last process of its sandbox."""
    if process.poll() is not None:
        return True
    fd = os.pidfd_open(process.pid)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await readable(fd)
    finally:
        os.close(fd)
    return process.poll() is not None
