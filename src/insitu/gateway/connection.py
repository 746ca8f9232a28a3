"""HTTP connections, where aiohttp's behaviour does not suit agents or unknown clients.

Bytes that are not HTTP are never logged: they may contain a key or a prompt. A connection without a key is
the first to be closed when there are too many, and its first request has a timeout. A client that closed its
sending half gets its answer; one that closed both is noticed at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import HttpVersion, HttpVersion11, web

log = logging.getLogger(__name__)

FIRST_REQUEST_S = 30.0
"""From the connection to the end of the first request's headers."""
IDLE_S = 600.0
"""Between two requests; connection pools of clients keep connections for less."""
PROBES_S = (0.002, 0.02, 0.2, 1.0)
"""Pauses between probes of a client that closed its sending half; the last one repeats."""
LOG_EVERY_S = 1.0


def mark_known(http: web.BaseRequest) -> None:
    """Mark the connection of an authorised request as known."""
    if isinstance(http.protocol, Connection):
        http.protocol.known = True


def name_request(response: web.StreamResponse, name: str = "") -> None:
    """Set the request-id headers of an answer that is not yet sent.

    `name`: hex; empty = random.
    """
    if not response.prepared and "request-id" not in response.headers:
        id = f"req_{name or secrets.token_hex(12)}"
        response.headers["request-id"] = response.headers["x-request-id"] = id


def json_response(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


class Noise:
    """Counts unreadable requests and logs at most one line per second and listener."""

    def __init__(self) -> None:
        self._count, self._since = 0, -LOG_EVERY_S

    def add(self, what: str) -> None:
        """Count one; `what` must not contain client data."""
        self._count += 1
        now = time.monotonic()
        if now - self._since >= LOG_EVERY_S:
            log.warning("requests that could not be handled count=%d last=%s", self._count, what)
            self._count, self._since = 0, now


class Connection(web.RequestHandler):
    """A connection that handles half-closed clients and requests that are not HTTP."""

    __slots__ = ("_first", "_last", "_noise", "_probe", "known")

    def __init__(self, manager: web.Server, noise: Noise, **options: Any) -> None:
        super().__init__(manager, keepalive_timeout=IDLE_S, **options)
        self._noise = noise
        self._first: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._last: tuple[Any, Any] | None = None
        """The newest request's head and body."""
        self.known = False
        """A request on it carried the key of a session."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._first = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._expire)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._first, self._probe):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _expire(self) -> None:
        if not self._request_count:
            self.force_close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open for the answer to a complete request.

        Interim answers probe whether the client still waits: a client that is gone rejects them, which closes
        the connection.
        """
        if not self._complete():
            return None
        self._close = True
        self._probe_client(0)
        return self._probe is not None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._last = self._messages[-1]

    def _complete(self) -> bool:
        """Return whether a complete HTTP/1.1 request is being handled and its answer has not begun."""
        if self._last is None or (self._waiter is not None and not self._messages):
            return False
        message, payload = self._last
        version: HttpVersion | None = getattr(message, "version", None)  # none where it was unreadable
        if version is None or version < HttpVersion11 or not payload.is_eof():
            return False
        request = self._current_request
        return request is None or not request.writer.output_size

    def _probe_client(self, number: int) -> None:
        self._probe = None
        if self.transport is None or not self._complete():
            return
        # Of all interim answers only this one is skipped by every client, http.client among them.
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.transport.is_closing():
            pause_s = PROBES_S[min(number, len(PROBES_S) - 1)]
            self._probe = asyncio.get_running_loop().call_later(pause_s, self._probe_client, number + 1)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        self._noise.add(type(kw.get("exc_info")).__name__)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is not HTTP, in a format that clients of every provider read."""
        self._noise.add(type(exc).__name__)
        if request.writer.output_size:
            raise ConnectionError("an answer was begun already")
        kind = "invalid_request_error" if status < 500 else "api_error"
        text = "The request is not valid HTTP." if status < 500 else "The gateway failed."
        error = {"type": kind, "message": text, "code": status, "param": None}
        body = orjson.dumps({"type": "error", "error": error})
        response = web.Response(body=body, status=status, content_type="application/json")
        response.force_close()
        return response
