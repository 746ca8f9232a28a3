"""Relays connections from a sandbox's loopback to the gateway's unix socket.

A listening socket belongs to the network namespace it was made in, so PID 1 opens one and passes its
descriptor to the host. The sandbox needs no forwarder process, socket file or network, and no process in it
can take the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

MAX_CONNECTIONS = 64


class _End(asyncio.Protocol):
    """One end of a relayed connection: data goes out at `peer`, with back-pressure."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: asyncio.Transport | None = None
        self.other: _End | None = None
        self.ended = False
        """End of file was received."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.peer is not None:
            self.peer.write(data)

    def eof_received(self) -> bool:
        """Half-close the peer; close both once both sides have ended."""
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
    """The sandbox's end; buffers data until the gateway's end is connected."""

    def __init__(self, relay: SocketRelay) -> None:
        super().__init__()
        self.relay = relay
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.relay.admit(self)

    def data_received(self, data: bytes) -> None:
        if self.peer is None and self.transport is not None:
            # Paused here and not in connection_made: asyncio of Python 3.11.2 (Debian 12) reads on after
            # connection_made even where that paused, and a second pause has no effect.
            self.transport.pause_reading()
            self.early += data
        else:
            super().data_received(data)

    def connect(self, exit_end: _End, out: asyncio.Transport) -> None:
        """Start relaying, buffered data first."""
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
        self.relay.open.discard(self)


class SocketRelay:
    """Accepts on `listener` and relays to `target` until closed."""

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
