"""Proxy in front of the gateway that records the HTTP traffic of an agent.

One file per agent, JSON lines compressed with xz: a head (agent, version, rollout, seed, limits, `books` with
the session's shape), then every exchange in order of arrival {"i", "method", "path", "headers", "body",
"status", "reply"}. Only the agent's own headers are kept; secret and id of the session are removed, and
prose of other authors is masked.
"""

from __future__ import annotations

import asyncio
import lzma
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

from insitu_lab.conformance.anonymise import masked

FORMAT = 1
MAX_BODY_BYTES = 64 << 20
HINTS = (
    *("x-claude-code-", "x-codex-", "x-session-", "x-parent-", "session-id", "thread-id"),
    *("x-stainless-retry-count", "anthropic-version", "anthropic-beta"),
)
"""Prefixes of the headers that are kept."""
_HOP = frozenset({"transfer-encoding", "content-length", "connection", "keep-alive", "content-encoding"})


@dataclass(slots=True, kw_only=True)
class RecordedExchange:
    """One request with its reply."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)
    status: int = 0
    reply: bytearray = field(default_factory=bytearray, repr=False)


class WireRecorder:
    """Proxy on its own socket; passes requests and streamed replies on unchanged."""

    def __init__(self, gateway_socket: Path) -> None:
        self.exchanges: list[RecordedExchange] = []
        self._gateway_socket = gateway_socket

    @asynccontextmanager
    async def listen(self, path: Path) -> AsyncIterator[None]:
        connector = aiohttp.UnixConnector(str(self._gateway_socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as client:

            async def handle(request: web.BaseRequest) -> web.StreamResponse:
                return await self._relay(client, request)

            server = web.Server(handle, handler_cancellation=True, access_log=None)
            runner = web.ServerRunner(server, shutdown_timeout=1.0)
            await runner.setup()
            try:
                await web.UnixSite(runner, path).start()
                yield
            finally:
                await runner.cleanup()
                await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _relay(self, client: aiohttp.ClientSession, request: web.BaseRequest) -> web.StreamResponse:
        raw = bytearray()
        async for chunk in request.content.iter_any():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(raw))
        body = bytes(raw)
        hints = {k.lower(): v for k, v in request.headers.items() if k.lower().startswith(HINTS)}
        kept = RecordedExchange(method=request.method, path=request.path_qs, headers=hints, body=body)
        self.exchanges.append(kept)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP - {"content-encoding"}}
        url = f"http://gateway{request.path_qs}"
        async with client.request(request.method, url, data=body or None, headers=headers) as reply:
            kept.status = reply.status
            passed = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
            response = web.StreamResponse(status=reply.status, headers=passed)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                kept.reply += chunk
                await response.write(chunk)
            await response.write_eof()
            return response

    def write(self, path: Path, head: Mapping[str, object], hidden: dict[str, str]) -> None:
        """Write the recording; `hidden` maps text to its replacement."""
        lines: list[object] = [{"format": FORMAT, **head}]
        for at, kept in enumerate(self.exchanges):
            lines.append(
                {
                    "i": at,
                    "method": kept.method,
                    "path": kept.path,
                    "headers": kept.headers,
                    "body": masked(orjson.loads(kept.body)) if kept.body else None,
                    "status": kept.status,
                    "reply": kept.reply.decode("utf-8", "replace"),
                }
            )
        text = b"\n".join(orjson.dumps(line) for line in lines) + b"\n"
        for secret, shown in hidden.items():
            text = text.replace(secret.encode(), shown.encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        # Bodies repeat over distances beyond gzip's window.
        path.write_bytes(lzma.compress(text, preset=6))
