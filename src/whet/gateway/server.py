"""The Gateway: one asyncio HTTP server that agents believe to be their model provider.

A request is routed by its path, known by its secret, parsed by a dialect and answered by its session. Headers
of a stream are held until the engine answered or failure is no longer likely; then comments keep it alive and
the reply follows as well-formed events. A turn counts as delivered only after its terminal event was written.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
from aiohttp import web

from whet.engine.base import Engine
from whet.errors import SetupError
from whet.gateway import sse
from whet.gateway.dialects.base import Dialect, Envelope, WireCall, WireError
from whet.gateway.dialects.chat import ChatDialect
from whet.gateway.request import GatewayConfig, Route, body_digest, read_body, secret_of, take_apart
from whet.gateway.session import Call, Session, secret_digest
from whet.gateway.turn import Answer, SessionSpec
from whet.render.family import Family
from whet.types import Limits

__all__ = ["Gateway", "GatewayConfig", "GatewayCounters", "Listener"]

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class GatewayCounters:
    """Since the gateway started; they only grow."""

    requests: int = 0
    replies: int = 0
    refused: int = 0
    """Requests answered with an error."""
    unauthorized: int = 0
    client_gone: int = 0
    defects: int = 0
    """Unexpected exceptions at the request boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Where a gateway listens."""

    path: Path | None = None
    host: str = ""
    port: int = 0


class Gateway:
    """Async context manager; its listeners and sessions live inside."""

    def __init__(self, engine: Engine, family: Family, config: GatewayConfig | None = None) -> None:
        self.config = config or GatewayConfig()
        self.counters = GatewayCounters()
        self._engine = engine
        self._family = family
        self._dialects: Mapping[str, Dialect] = {"chat/completions": ChatDialect()}
        self._sessions: dict[bytes, Session] = {}
        self._by_public_id: dict[str, Session] = {}
        self._sealed: OrderedDict[bytes, None] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in list(self._sessions.values()):
            await session.abandon()

    def open_session(
        self,
        rollout_id: str,
        *,
        seed: int,
        limits: Limits,
        temperature: float = 1.0,
        max_call_tokens: int | None = None,
        listener: Path | None = None,
    ) -> Session:
        """A new session with its own secret. With `listener`, only requests through that socket count."""
        spec = SessionSpec(
            rollout_id=rollout_id,
            seed=seed,
            limits=limits,
            temperature=temperature,
            max_call_tokens=min(limits.max_call_tokens, max_call_tokens or limits.max_call_tokens),
            engine_deadline_s=self.config.engine_deadline_s,
            inline_chars=self.config.inline_chars,
        )
        session = Session(
            self._engine,
            self._family,
            spec,
            listener=listener,
            max_concurrent_calls=self.config.max_concurrent_calls,
            grace_s=self.config.disconnect_grace_s,
            on_sealed=self._retire,
        )
        self._sessions[session.secret_digest] = session
        self._by_public_id[session.public_id] = session
        return session

    def _retire(self, session: Session) -> None:
        self._sessions.pop(session.secret_digest, None)
        self._by_public_id.pop(session.public_id, None)
        self._sealed[session.secret_digest] = None
        while len(self._sealed) > self.config.sealed_kept:
            self._sealed.popitem(last=False)

    # ----------------------------------------------------------------------- listeners

    @asynccontextmanager
    async def listen_unix(self, path: Path) -> AsyncIterator[Listener]:
        """Serve a unix socket. Raises SetupError, also for a path too long for the system."""
        if len(bytes(path)) > 107:
            raise SetupError(f"unix socket path is longer than 107 bytes: {path}")
        async with self._runner(path) as runner:
            try:
                await web.UnixSite(runner, path).start()
            except OSError as error:
                raise SetupError(f"cannot listen on {path}: {error.strerror or error}") from error
            try:
                yield Listener(path=path)
            finally:
                path.unlink(missing_ok=True)  # noqa: ASYNC240 - one system call on a local socket

    @asynccontextmanager
    async def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Listener]:
        """Serve a TCP port; 0 takes a free one. Raises SetupError when the port is taken."""
        async with self._runner(None) as runner:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
            yield Listener(host=host, port=runner.addresses[0][1])

    @asynccontextmanager
    async def _runner(self, listener: Path | None) -> AsyncIterator[web.ServerRunner]:
        """One HTTP server per listener, so that a request cannot lie about where it came in."""
        handler = functools.partial(self._handle, listener)
        server = web.Server(handler, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        try:
            yield runner
        finally:
            await runner.cleanup()

    # ----------------------------------------------------------------------- requests

    async def _handle(self, listener: Path | None, http: web.BaseRequest) -> web.StreamResponse:
        """The request boundary: every failure ends as an answer of the provider's shape."""
        self.counters.requests += 1
        dialect: Dialect = self._dialects["chat/completions"]
        try:
            return await self._answer(listener, http, dialect)
        except WireError as error:
            return self._refusal(dialect, error)
        except (ConnectionResetError, asyncio.CancelledError):
            self.counters.client_gone += 1
            raise
        except Exception:  # the boundary; sessions keep their own failures
            self.counters.defects += 1
            log.exception("request failed path=%s", http.path)
            return self._refusal(dialect, WireError("engine_failed", "The gateway failed."))

    def _refusal(self, dialect: Dialect, error: WireError) -> web.Response:
        self.counters.refused += 1
        self.counters.unauthorized += error.cause == "unauthorized"
        return _json(dialect.error(error), error.status)

    async def _answer(
        self, listener: Path | None, http: web.BaseRequest, dialect: Dialect
    ) -> web.StreamResponse:
        if http.path == "/health":
            return _json({"status": "ok"})
        route = take_apart(http.path)
        if route is None or route.action not in (*self._dialects, "models"):
            raise WireError("not_found", f"Unknown request URL: {http.method} {http.path}.")
        session = self._authorise(route, http, listener)
        if http.method != ("GET" if route.action == "models" else "POST"):
            raise WireError("method_not_allowed", f"Not allowed: {http.method} {http.path}.")
        if route.action == "models":
            return _json(dialect.models(self.config.model_name))
        body = await read_body(http, self.config)
        wire = self._dialects[route.action].parse(body, route.action)
        call = session.admit(body_digest(route.action, body), wire.request)
        return await self._deliver(http, session, call, dialect, wire)

    def _authorise(self, route: Route, http: web.BaseRequest, listener: Path | None) -> Session:
        """The session whose secret the request carries; path and secret must agree. Raises WireError."""
        secret = secret_of(http)
        if secret is None:
            raise WireError("unauthorized", "You didn't provide an API key.")
        digest = secret_digest(secret)
        session = self._sessions.get(digest)
        if session is None and digest in self._sealed:
            raise WireError("session_closed", "This session is closed.")
        if session is None or not session.owns(secret, listener):
            raise WireError("unauthorized", "Incorrect API key provided.")
        if route.public_id is not None and self._by_public_id.get(route.public_id) is not session:
            raise WireError("unauthorized", "Incorrect API key provided.")
        return session

    # ----------------------------------------------------------------------- replies

    async def _deliver(
        self, http: web.BaseRequest, session: Session, call: Call, dialect: Dialect, wire: WireCall
    ) -> web.StreamResponse:
        """Wait for the call and write its reply; the call is marked delivered only after the last byte."""
        try:
            write = self._stream if wire.request.stream else self._whole
            response = await write(http, session, call, dialect, wire)
        except (ConnectionResetError, TimeoutError) as error:
            session.released(call)
            raise ConnectionResetError("client gone") from error
        except BaseException:
            session.released(call)
            raise
        self.counters.replies += 1
        return response

    async def _whole(
        self, http: web.BaseRequest, session: Session, call: Call, dialect: Dialect, wire: WireCall
    ) -> web.StreamResponse:
        await asyncio.wait({call.task})
        answer = _result(call)
        response = _json(dialect.reply(answer.reply, self._envelope(session, answer, wire)))
        async with asyncio.timeout(self.config.write_timeout_s):
            await response.prepare(http)
            await response.write_eof()
        session.delivered(call)
        return response

    async def _stream(
        self, http: web.BaseRequest, session: Session, call: Call, dialect: Dialect, wire: WireCall
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=sse.HEADERS)
        wait_s = self.config.hold_headers_s
        while not (await asyncio.wait({call.task}, timeout=wait_s))[0]:
            await self._write(http, response, sse.KEEP_ALIVE)
            wait_s = self.config.keep_alive_s
        try:
            answer = _result(call)
        except WireError as error:
            if not response.prepared:
                raise
            self.counters.refused += 1
            await self._write(http, response, dialect.error_event(error))
            await response.write_eof()
            session.released(call)
            return response
        envelope = self._envelope(session, answer, wire)
        await self._write(http, response, b"".join(dialect.events(answer.reply, envelope)))
        session.delivered(call)
        await response.write_eof()
        return response

    async def _write(self, http: web.BaseRequest, response: web.StreamResponse, frames: bytes) -> None:
        async with asyncio.timeout(self.config.write_timeout_s):
            if not response.prepared:
                await response.prepare(http)
            await response.write(frames)

    def _envelope(self, session: Session, answer: Answer, wire: WireCall) -> Envelope:
        name = f"{session.rollout_id}\0{answer.turn}".encode()
        return Envelope(
            id="chatcmpl-" + hashlib.blake2b(name, digest_size=12).hexdigest(),
            created=int(time.time()),
            model=self.config.model_name,
            include_usage=wire.include_usage,
            names=wire.names,
        )


def _result(call: Call) -> Answer:
    """The finished call's answer. Raises WireError; a defect was kept by the session."""
    if call.task.cancelled():
        raise WireError("session_closed", "This session is closed.")
    error = call.task.exception()
    if error is not None and not isinstance(error, WireError):
        raise WireError("engine_failed", "The gateway failed.") from error
    return call.task.result()


def _json(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
