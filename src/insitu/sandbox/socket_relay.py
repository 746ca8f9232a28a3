"""Carries connections from a sandbox's loopback to the gateway's unix socket.

A listening socket belongs to the network it was made in, so the sandbox's PID 1 makes one on the sandbox's
loopback and hands its descriptor to the host. The sandbox therefore needs no forwarder process, no socket
file and no network, and nothing in it can take the port or kill the way to its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

MAX_CONNECTIONS = 64


class _End(asyncio.Protocol):
    """One end of a carried connection: what arrives goes out at `peer`, with back-pressure."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: asyncio.Transport | None = None
        self.other: _End | None = None
        self.ended = False
        """The far side has said all it will say."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.peer is not None:
            self.peer.write(data)

    def eof_received(self) -> bool:
        """Half-closed is carried on as half-closed; once both sides have ended, nobody else would close."""
        self.ended = True
        if self.peer is not None and self.peer.can_write_eof() and not self.peer.is_closing():
            self.peer.write_eof()
        if self.other is not None and self.other.ended:
            for transport in (self.transport, self.peer):
                if transport is not None:
                    transport.close()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if self.peer is not None:
            self.peer.close()

    def pause_writing(self) -> None:
        if self.peer is not None:
            self.peer.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and not self.peer.is_closing():
            self.peer.resume_reading()


class _Entrance(_End):
    """The end in the sandbox. What it sends before the gateway's end is connected is kept."""

    def __init__(self, forward: SocketRelay) -> None:
        super().__init__()
        self.forward = forward
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.forward.admit(self)

    def data_received(self, data: bytes) -> None:
        if self.peer is None and self.transport is not None:
            # Paused here and not in connection_made: asyncio of Python 3.11.2 (Debian 12) reads on after
            # connection_made even where that paused, and a second pause has no effect.
            self.transport.pause_reading()
            self.early += data
        else:
            super().data_received(data)

    def connect(self, exit_end: _End, out: asyncio.Transport) -> None:
        """Start to carry, beginning with what has come already."""
        self.peer, self.other, exit_end.other = out, exit_end, self
        if self.transport is None or self.transport.is_closing():
            out.close()
            return
        out.write(self.early)
        self.early = b""
        if self.ended:
            out.write_eof()
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.forward.open.discard(self)


class SocketRelay:
    """Accepts on `listener` and carries to `target` until closed."""

    def __init__(self, listener: socket.socket, target: Path) -> None:
        self.open: set[_Entrance] = set()
        self._listener = listener
        self._target = target
        self._server: asyncio.Server | None = None
        self._dialling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Entrance(self), sock=self._listener)

    def admit(self, entrance: _Entrance) -> None:
        transport = entrance.transport
        if transport is None or len(self.open) >= MAX_CONNECTIONS:
            if transport is not None:
                transport.abort()
            return
        self.open.add(entrance)
        task = asyncio.get_running_loop().create_task(self._dial(entrance, transport))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, entrance: _Entrance, transport: asyncio.Transport) -> None:
        exit_end = _End()
        exit_end.peer = transport
        try:
            async with asyncio.timeout(10):
                loop = asyncio.get_running_loop()
                out, _ = await loop.create_unix_connection(lambda: exit_end, str(self._target))
        except (OSError, TimeoutError):
            transport.abort()
            return
        entrance.connect(exit_end, out)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._dialling):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for entrance in list(self.open):
            for transport in (entrance.transport, entrance.peer):
                if transport is not None:
                    transport.abort()
        self.open.clear()
