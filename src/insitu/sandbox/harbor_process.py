"""A detached run as a Process: polled in the background, read from its log."""

from __future__ import annotations

import asyncio
import contextlib
import math

from insitu.errors import SandboxError
from insitu.sandbox.detached import KILLED, Detached

READ_S = 0.2
LOG_TAIL = 16 << 10


class HarborProcess:
    """Implements insitu.sandbox.base.Process, but for input: there is none."""

    def __init__(self, run: Detached) -> None:
        self._run = run
        self.id = run.id
        self._code: int | None = None
        self._tail = b""
        self._read = bytearray()
        self._offset = 0
        self._watch = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        try:
            self._code = await self._run.wait(math.inf)
            with contextlib.suppress(SandboxError):
                self._tail = (await self._run.read_log(max_bytes=16 << 20))[-LOG_TAIL:]
        except SandboxError:  # the sandbox is gone, and the process with it
            self._code = KILLED

    async def write(self, data: bytes) -> None:
        raise SandboxError("a process in a sandbox of Harbor has no input")

    async def readline(self, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            while True:
                ended = self._watch.done()
                more = await self._run.read_log(self._offset)
                self._offset += len(more)
                self._read += more
                end = self._read.find(b"\n") + 1
                if end or (ended and not more):
                    line = bytes(self._read[: end or len(self._read)])
                    del self._read[: len(line)]
                    return line
                if not more:
                    await asyncio.sleep(READ_S)

    def poll(self) -> int | None:
        """As of the last look, at most about a second ago."""
        return self._code

    async def wait(self, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._watch)
        return KILLED if self._code is None else self._code

    async def kill(self) -> None:
        if self._code is None:
            await self._run.kill()

    def stderr_tail(self) -> bytes:
        """Of everything it wrote: complaints and output are one stream here. Empty while it runs."""
        return self._tail

    def forget(self) -> None:
        """The sandbox ends: nothing is asked of it any more."""
        self._watch.cancel()
        if self._code is None:
            self._code = KILLED
