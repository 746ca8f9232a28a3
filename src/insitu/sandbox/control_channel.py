"""The host's end of the control socket to a sandbox's PID 1 (supervisor.py)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable, Sequence

from insitu.errors import SandboxError, SandboxLost
from insitu.stalls import awake_timeout

ANSWER_S = 60.0
"""PID 1 competes with all of the sandbox's processes for the CPUs. Stalls of the machine do not count."""
MAX_FDS = 16
_CREDENTIALS = struct.Struct("3i")


async def readable(fd: int) -> None:
    """Wait until `fd` can be read without blocking. The caller sets a deadline."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await waiter
    finally:
        loop.remove_reader(fd)


class Control:
    """Numbered jobs over the control socket. A job answers with its exit code, an order with a number."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[str, asyncio.Future[int]] = {}
        self._buffer = bytearray()
        self._sending = asyncio.Lock()
        self.lost = False
        self.on_loss: Callable[[], None] = lambda: None
        """Called when the other end is gone; not after `close`."""
        sock.setblocking(False)

    @property
    def peer(self) -> int:
        """PID of the connected process; 0 outside of this PID namespace."""
        peer = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(peer)
        return int(pid)

    async def ready(self) -> list[int]:
        """Wait for the first line; return the descriptors sent with it. The caller sets a deadline."""
        await readable(self._sock.fileno())
        try:
            line, fds, _, _ = socket.recv_fds(self._sock, 64, MAX_FDS)
        except OSError as error:
            raise SandboxError(f"no answer from the sandbox: {error.strerror}") from error
        if line != b"ready\n":
            for fd in fds:
                os.close(fd)
            raise SandboxError("the sandbox ended while it was built")
        self._loop.add_reader(self._sock, self._receive)
        return fds

    def _receive(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            self.on_loss()
            return
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            word, job, value = line.decode("ascii", "replace").split(" ", 2)
            future = self._answers.pop(job, None) if word in ("exit", "swept") else None
            if future is not None and not future.done():
                future.set_result(int(value))

    def _lose(self) -> None:
        self.lost = True
        self._loop.remove_reader(self._sock)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(SandboxLost("the sandbox has ended"))
                future.exception()  # mark as retrieved: not every job is awaited
        self._answers.clear()

    async def start(
        self, kind: str, fields: Sequence[str], fds: Sequence[int] = ()
    ) -> tuple[str, asyncio.Future[int]]:
        """Send one job; return its number and its answer. Raises SandboxLost."""
        job = str(next(self._numbers))
        parts = [os.fsencode(part) for part in (kind, job, *fields)]
        if any(b"\0" in part for part in parts):
            raise SandboxError("a NUL character cannot be part of a command")
        body = b"\0".join(parts)
        if self.lost:
            raise SandboxLost("the sandbox has ended")
        future = self._loop.create_future()
        self._answers[job] = future
        async with self._sending:
            try:
                socket.send_fds(self._sock, [struct.pack("<I", len(body))], fds)
                async with awake_timeout(ANSWER_S):
                    await self._loop.sock_sendall(self._sock, body)
            except (OSError, TimeoutError) as error:
                if isinstance(error, OSError) and error.errno == errno.ETOOMANYREFS:
                    # Nothing was sent: the user's sandboxes have too many descriptors in transit just now.
                    del self._answers[job]
                    raise SandboxError(f"a job was not sent to the sandbox: {error.strerror}") from error
                self._lose()
                raise SandboxLost(f"the control socket of the sandbox failed: {error}") from error
        return job, future

    async def order(self, kind: str, *fields: str) -> int:
        """Send an order and return its answer. Raises SandboxLost, also on a timeout."""
        _, future = await self.start(kind, fields)
        try:
            async with awake_timeout(ANSWER_S):
                return await future
        except TimeoutError as error:
            raise SandboxLost(f"the sandbox did not answer `{kind}` within {ANSWER_S:.0f} s") from error

    def close(self) -> None:
        if not self.lost:
            self._lose()
        with contextlib.suppress(OSError):
            self._sock.close()
