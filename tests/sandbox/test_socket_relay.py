"""The relay keeps nothing of a connection that both sides have ended."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from insitu.sandbox.socket_relay import MAX_CONNECTIONS, SocketRelay


@pytest.mark.parametrize("first", ["client", "server"])
async def test_ended_connections_are_let_go(tmp_path: Path, first: str) -> None:
    """More connections in a row than may be open at once, whoever closes first."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await (reader.read() if first == "client" else reader.readline())
        writer.write(b"heard " + question)
        await writer.drain()
        writer.close()

    target = tmp_path / "gateway.sock"
    server = await asyncio.start_unix_server(answer, str(target))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    forward = SocketRelay(listener, target)
    await forward.start()
    try:
        for number in range(MAX_CONNECTIONS * 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"%d\n" % number)
            if first == "client":
                writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b"heard %d\n" % number
            writer.close()
            await writer.wait_closed()
        for _ in range(100):
            if not forward.open:
                break
            await asyncio.sleep(0.01)
        assert not forward.open
    finally:
        await forward.close()
        server.close()


@pytest.mark.parametrize("end", [False, True])
async def test_what_comes_before_the_gateway_is_connected_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bool
) -> None:
    """A request, or the mere end of one, that arrives while the gateway's socket is still being connected.

    `pause_reading` has no effect within connection_made, as in asyncio of Python 3.11.2.
    """
    made = asyncio.Event()
    dialled = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await (reader.read() if end else reader.readline())
        writer.write(b"got " + question)
        writer.close()

    target = tmp_path / "gateway.sock"
    server = await asyncio.start_unix_server(answer, str(target))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    forward = SocketRelay(listener, target)
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection

    async def slowly(*args: Any, **options: Any) -> Any:
        made.set()
        await dialled.wait()
        return await connect(*args, **options)

    def admit(entrance: Any) -> None:
        pause, entrance.transport.pause_reading = entrance.transport.pause_reading, lambda: None
        SocketRelay.admit(forward, entrance)
        entrance.transport.pause_reading = pause

    monkeypatch.setattr(loop, "create_unix_connection", slowly)
    monkeypatch.setattr(forward, "admit", admit)
    await forward.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(made.wait(), 5)
        if end:
            writer.write_eof()
        else:
            writer.write(b"early\n")
        await asyncio.sleep(0.05)
        dialled.set()
        assert await asyncio.wait_for(reader.read(), 5) == (b"got " if end else b"got early\n")
        writer.close()
        await writer.wait_closed()
    finally:
        await forward.close()
        server.close()
