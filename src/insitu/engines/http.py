"""One HTTP connection pool to one engine server: JSON in, JSON out, every call with a timeout.

Only the configured origin is contacted: no redirects, no proxies from the environment. A request is retried
only when the server cannot have started it (no connection, or a 429/503 without a result), a bounded number
of times. Every failure is an EngineError that names the server and the call, never a header;
EngineUnavailable where a retry may succeed later.
`RequestGate` holds new calls to a server while it sleeps or loads weights; only loading has a timeout, since
a sleep may last a whole training step. Seeds and ids of requests depend on the key alone, so a run repeats
its samples and a server's log line leads to a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from insitu.backoff import backoff_s
from insitu.engines.downtime import engine_down
from insitu.errors import ConfigError, EngineError, EngineUnavailable
from insitu.types import RequestKey

Body = Mapping[str, Any]
_BUSY = frozenset({429, 503})
_MAX_REPLY = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Connection options of an engine server."""

    url: str
    """Origin and optional path prefix, http or https."""
    key: str = field(default="", repr=False)
    """Bearer token; empty = none."""
    call_deadline_s: float = 600.0
    """Timeout of one generation or one weight reload."""
    control_deadline_s: float = 30.0
    """Timeout of every other call."""
    connect_deadline_s: float = 5.0
    retries: int = 3
    """Retries of a request that the server has not started."""
    max_connections: int = 1024
    context_versions: int = 0
    """Most versions that a call's context may be older than the weights; 0 = updates compute it again."""
    experts: bool = False
    """The server must return the experts that it chose for each token."""


def checked_url(text: str, key: str) -> str:
    """Return an http(s) URL without a trailing slash or /v1; calls add the version themselves.

    Credentials, query and fragment are errors. Raises ConfigError naming `key`.
    """
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{key}: {text!r} is not a URL") from error
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        raise ConfigError(f"{key}: {text!r} is not an http or https URL")
    if url.username or url.password or url.query or url.fragment:
        raise ConfigError(f"{key} must be an origin with at most a path: keys go into environment variables")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


class NotOffered(EngineError):
    """The server does not have the route, or has it disabled (404, 403, 405, 501)."""


class EngineHttp:
    """Calls to one server; created by `open_http`."""

    def __init__(self, session: aiohttp.ClientSession, options: HttpOptions, name: str) -> None:
        self.name, self.options = name, options
        self._session = session
        self._base = checked_url(options.url, "engine.urls")

    async def get(self, path: str, *, deadline_s: float | None = None) -> Body:
        return await self._call("GET", path, None, {}, {}, deadline_s)

    async def post(
        self,
        path: str,
        body: Body | None = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        passing: type[EngineError] = EngineError,
    ) -> Body:
        """Return the decoded JSON object of the answer; empty for an answer without a body or in plain text.

        `passing`: the error class for timeouts and HTTP 500, which may be temporary.
        """
        return await self._call("POST", path, body, query or {}, headers or {}, deadline_s, passing)

    async def _call(
        self,
        method: str,
        path: str,
        body: Body | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        deadline_s: float | None,
        passing: type[EngineError] = EngineError,
    ) -> Body:
        limit = deadline_s or self.options.control_deadline_s
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with asyncio.timeout(limit):
                for attempt in range(self.options.retries + 1):
                    again = attempt < self.options.retries
                    answer = await self._once(method, path, data, query, headers, again, passing)
                    if answer is not None:
                        return answer
                    await asyncio.sleep(backoff_s(attempt + 1, 0.1, 2.0))
        except TimeoutError as error:
            raise passing(f"{self.name} did not answer {path} within {limit:g} s") from error
        raise EngineError(f"{self.name}: {path} failed after {self.options.retries} retries")

    async def _once(
        self,
        method: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        again: bool,
        passing: type[EngineError],
    ) -> Body | None:
        """Return the answer, or None if the server has not started the request and it may be sent `again`."""
        try:
            async with self._session.request(
                method,
                self._base + path,
                data=data,
                params=query,
                headers={"Content-Type": "application/json", **headers},
                allow_redirects=False,
            ) as response:
                if response.status in _BUSY and again:
                    return None
                raw = await self._read(response)
                # vLLM gives its words about adapters no type, which reads as octet-stream
                words = response.content_type.startswith(("text/", "application/octet-stream"))
                return self._decoded(path, response.status, b"" if words and response.ok else raw, passing)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if again:
                return None
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise EngineUnavailable(f"{self.name} is not reachable for {path}: {why}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            raise EngineUnavailable(f"{self.name} closed the connection during {path}: {why}") from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        raw = bytearray()
        async for chunk in response.content.iter_any():
            raw += chunk
            if len(raw) > _MAX_REPLY:
                raise EngineError(f"{self.name} sent more than {_MAX_REPLY >> 20} MiB")
        return bytes(raw)

    def _decoded(self, path: str, status: int, raw: bytes, passing: type[EngineError]) -> Body:
        if status in (403, 404, 405, 501):
            raise NotOffered(f"{self.name} does not offer {path} (HTTP {status}): {_error_text(raw)}")
        if status in (429, 502, 503, 504):
            raise EngineUnavailable(
                f"{self.name} is unavailable for {path} (HTTP {status}): {_error_text(raw)}"
            )
        if status == 500:
            raise passing(f"{self.name} refused {path} (HTTP 500): {_error_text(raw)}")
        if not 200 <= status < 300:
            raise EngineError(f"{self.name} refused {path} (HTTP {status}): {_error_text(raw)}")
        if not raw.strip():
            return {}
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            # Some servers print a bare NaN where a number is missing: that is no JSON and no number.
            raise EngineError(f"{self.name} answered {path} with something that is not JSON") from error
        if not isinstance(value, dict):
            raise EngineError(f"{self.name} answered {path} with JSON that is not an object")
        return value


def _error_text(raw: bytes) -> str:
    """Return the server's error message, shortened."""
    with contextlib.suppress(orjson.JSONDecodeError):
        value = orjson.loads(raw)
        if isinstance(value, dict):
            inner = value.get("error", value)
            text = inner.get("message", inner.get("detail", inner)) if isinstance(inner, dict) else inner
            return " ".join(str(text).split())[:300]
    return " ".join(raw.decode("utf-8", "replace").split())[:300]


@asynccontextmanager
async def open_http(options: HttpOptions, name: str) -> AsyncIterator[EngineHttp]:
    """Open a connection pool for the context."""
    # Servers close idle connections after a few seconds; one that is about to be closed must not be re-used.
    connector = aiohttp.TCPConnector(
        limit=options.max_connections, keepalive_timeout=2.0, socket_factory=_watched_socket
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_deadline_s)
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, trust_env=False, auto_decompress=True
    ) as session:
        yield EngineHttp(session, options, name)


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that fails when the other side is gone without a word.

    A call is silent while it is answered: a router may forget it, a machine may be cut off.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # while sent data is not acknowledged, nothing is kept alive
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 90_000)
    return made


class RequestGate:
    """Gate for new calls; initially open."""

    def __init__(self) -> None:
        self._open, self._awake = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._awake.set()
        self.broken = ""
        """Why calls are refused; empty = they are not."""

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def sleep(self) -> None:
        """Close the gate and suspend timeouts until `wake`."""
        self._open.clear()
        self._awake.clear()

    def wake(self) -> None:
        """Resume timeouts, also after a failed wake-up; `open` opens the gate."""
        self._awake.set()

    async def wait(self, limit_s: float) -> None:
        """Return when the gate is open; raise TimeoutError after `limit_s` without a sleep."""
        with engine_down():
            while not (self._open.is_set() and self._awake.is_set()):
                await self._awake.wait()
                async with asyncio.timeout(limit_s):
                    await self._open.wait()

    async def admit(self, limit_s: float, late: str) -> None:
        """Return when a call may be sent; raise EngineError, after `limit_s` the line `late`."""
        try:
            await self.wait(limit_s)
        except TimeoutError as error:
            raise EngineError(late) from error
        if self.broken:
            raise EngineError(self.broken)


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()


def stream_seed(key: RequestKey) -> int:
    """Return the seed of one request's random stream, 0 <= seed < 2**63."""
    return int.from_bytes(_digest(key.seed, key.rollout_id, key.turn), "little") >> 1


def request_name(key: RequestKey, number: int) -> str:
    """Return the request id; `number` distinguishes requests of the same key."""
    return f"insitu-{_digest(key.seed, key.rollout_id, key.turn).hex()}-{number}"


def session_name(key: RequestKey) -> str:
    """Return a session id for routers that keep a conversation on the replica with its prefix."""
    return _digest(key.seed, key.rollout_id).hex()
