"""The relay keeps nothing of a connection that both sides have ended."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from whet.sandbox.forward import MAX_CONNECTIONS, Forward


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
    forward = Forward(listener, target)
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
