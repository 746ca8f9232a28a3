"""Pipes of sandboxed processes, and the handle of a spawned one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

from insitu.errors import SandboxLost
from insitu.stalls import awake_timeout

STDERR_TAIL = 16 << 10
LINE_BYTES = 64 << 20


class Output:
    """Read end of a pipe; keeps the first `limit` bytes, or with `tail` the last."""

    def __init__(self, limit: int, *, tail: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._limit, self._tail = limit, tail
        self._kept = bytearray()
        self._open = True
        self.truncated = False
        self._loop.add_reader(self._read, self._pump)

    def _pump(self) -> bool:
        """Read one chunk; return False when there is none."""
        try:
            chunk = os.read(self._read, 65536)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._read)
            return False
        if self._tail:
            self._kept += chunk
            del self._kept[: -self._limit]
        else:
            room = self._limit - len(self._kept)
            self._kept += chunk[:room]
            self.truncated |= len(chunk) > room
        return True

    def started(self) -> None:
        """Close the write end: the child has its copy."""
        os.close(self.write_end)

    def abandon(self) -> None:
        """Close both ends: no child was started."""
        self.started()
        self.finish()

    @property
    def value(self) -> bytes:
        return bytes(self._kept)

    def finish(self) -> bytes:
        """Read the rest and close; return what was kept."""
        # Bounded, without waiting for the end of file: a background process may still write to the pipe.
        if self._open:
            for _ in range(1 + self._limit // 4096):
                if not self._pump():
                    break
            self._open = False
            self._loop.remove_reader(self._read)
            os.close(self._read)
        return self.value


class LocalProcess:
    """Implements insitu.sandbox.base.Process."""

    def __init__(
        self,
        code: asyncio.Future[int],
        reader: asyncio.StreamReader,
        source: asyncio.ReadTransport,
        writer: asyncio.StreamWriter,
        stderr: Output,
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self._code = code
        self._reader = reader
        self._source = source
        self._writer = writer
        self._stderr = stderr
        self._kill = kill

    async def write(self, data: bytes) -> None:
        if self.poll() is not None:
            raise SandboxLost(f"the process ended with {self.poll()}")
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise SandboxLost(f"the process closed its input: {error}") from error

    async def readline(self, timeout_s: float) -> bytes:
        try:
            async with awake_timeout(timeout_s):
                return await self._reader.readline()
        except ValueError as error:
            raise SandboxLost(f"the process wrote a line of more than {LINE_BYTES} bytes") from error

    def poll(self) -> int | None:
        """Return the exit code or None; -9 also when the sandbox died."""
        if not self._code.done():
            return None
        return -9 if self._code.cancelled() or self._code.exception() else self._code.result()

    async def wait(self, timeout_s: float) -> int:
        async with awake_timeout(timeout_s):
            with contextlib.suppress(SandboxLost):
                await asyncio.shield(self._code)
        code = self.poll()
        return -9 if code is None else code

    async def kill(self) -> None:
        if self.poll() is None:
            await self._kill()

    def stderr_tail(self) -> bytes:
        return self._stderr.value

    def close_pipes(self) -> None:
        self._writer.close()
        self._source.close()
        self._stderr.finish()
