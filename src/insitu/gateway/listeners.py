"""HTTP listeners on unix sockets and loopback TCP ports.

Each listener is a server of its own, so that the origin of a request cannot be forged.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from insitu.errors import SetupError
from insitu.gateway.connection import Connection, Noise

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
MAX_CONNECTIONS = 4096
"""Per listener: bytes of a connection are buffered before it is authorised."""


class _Server(web.Server):
    """Server with a limit of connections.

    Beyond it the oldest connection that showed no key is closed, or the new one where there is none.
    """

    max_connections = MAX_CONNECTIONS

    def __init__(self, handler: Handler, **options: Any) -> None:
        super().__init__(handler, **options)
        self._noise = Noise()
        self._closing = set[web.RequestHandler]()
        """Connections that were closed to make room and are still counted."""

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._noise, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) - len(self._closing) <= self.max_connections:
            return
        staying = (one for one in self.connections if one not in self._closing)
        unknown = (one for one in staying if isinstance(one, Connection) and not one.known)
        victim = next(unknown, handler)
        self._closing.add(victim)
        victim.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._closing.discard(handler)
        super().connection_lost(handler, exc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Address of a listener."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def origin(self) -> str:
        """Base URL of a TCP listener."""
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def listen_unix(
    handler: Handler, path: Path, max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[Listener]:
    """Serve a unix socket. Raises SetupError, also for a path too long for the system."""
    if len(bytes(path)) > 107:
        raise SetupError(f"unix socket path is longer than 107 bytes: {path}")
    async with _runner(handler, max_connections) as runner:
        try:
            await web.UnixSite(runner, path).start()
        except OSError as error:
            raise SetupError(f"cannot listen on {path}: {error.strerror or error}") from error
        try:
            yield Listener(path=path)
        finally:
            path.unlink(missing_ok=True)  # noqa: ASYNC240 - one system call on a local socket


def check_port(key: str, host: str, port: int) -> None:
    """Raise SetupError if the address of a key cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise bind_error(key, host, port, error) from error


def bind_error(key: str, host: str, port: int, error: OSError) -> SetupError:
    """Return the error of a port that cannot be bound, with the key that names it."""
    why = os.strerror(error.errno) if error.errno else str(error)
    return SetupError(f"{key}: cannot listen on {host}:{port}: {why}")


@asynccontextmanager
async def listen_tcp(
    handler: Handler, host: str, port: int, max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[Listener]:
    """Serve a TCP port; 0 takes a free one. Raises SetupError when the port is taken."""
    async with _runner(handler, max_connections) as runner:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise bind_error("gateway.listen", host, port, error) from error
        yield Listener(host=host, port=runner.addresses[0][1])


@asynccontextmanager
async def _runner(handler: Handler, max_connections: int) -> AsyncIterator[web.ServerRunner]:
    # Bodies are unpacked by request.py, within its limits.
    server = _Server(handler, handler_cancellation=True, access_log=None, auto_decompress=False)
    server.max_connections = max_connections
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()
