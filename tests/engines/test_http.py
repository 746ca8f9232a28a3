"""Connections to an engine's server that break without a word."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from insitu.engines.http import HttpOptions, open_http
from insitu.errors import EngineError

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Answers each request with `{}`; `closes` after `idle_s`, or `hangs` from a request on."""

    def __init__(self, *, idle_s: float = 60.0, hangs: int = 1 << 30) -> None:
        self.requests = self.connections = 0
        self._idle_s, self._hangs = idle_s, hangs
        self.serving: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(self._idle_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                self.requests += 1
                if self.requests >= self._hangs:
                    await asyncio.sleep(3600)
                writer.write(ANSWER)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in server.serving:
            task.cancel()
        await asyncio.gather(*server.serving, return_exceptions=True)


async def test_a_server_that_falls_silent_in_a_call_is_noticed_and_not_asked_twice() -> None:
    server = Server(hangs=2)
    async with serving(server) as url, open_http(HttpOptions(url=url), "vLLM") as http:
        assert await http.post("/generate", {}) == {}
        with pytest.raises(EngineError, match="vLLM did not answer /generate within 0.2 s"):
            await http.post("/generate", {}, deadline_s=0.2)
    assert server.requests == 2


async def test_a_server_that_closes_idle_connections_costs_no_call() -> None:
    server = Server(idle_s=0.02)
    async with serving(server) as url, open_http(HttpOptions(url=url), "vLLM") as http:
        for _ in range(3):
            assert await http.post("/generate", {}) == {}
            await asyncio.sleep(0.1)
    assert (server.requests, server.connections) == (3, 3)


async def test_a_connection_asks_whether_the_other_side_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long call sends nothing for minutes: a router may forget it, a machine may be gone."""
    made: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    plain = loop.sock_connect

    async def noted(one: socket.socket, address: object) -> None:
        made.append(one)
        await plain(one, address)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "sock_connect", noted)
    async with serving(Server()) as url, open_http(HttpOptions(url=url), "vLLM") as http:
        await http.post("/generate", {})
        (one,) = made
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, every_s, tries = (
            one.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        unanswered_ms = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 30 <= idle_s + tries * every_s <= 120
    # what was sent and is not acknowledged keeps those questions from being asked
    assert unanswered_ms == 90_000
