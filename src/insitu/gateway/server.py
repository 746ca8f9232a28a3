"""The Gateway: one asyncio HTTP server that agents believe to be their model provider.

A request is routed by its path, known by its secret, parsed by a dialect and answered by its session. The
agent's secret opens model routes only, the tool secret host tools only; admin listens elsewhere (admin.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from insitu.chat.renderer import ChatRenderer, forgotten_before
from insitu.engines.base import Engine
from insitu.gateway import mcp
from insitu.gateway.body_cache import BodyCache, BodyName
from insitu.gateway.connection import name_request, vouch
from insitu.gateway.dialects.anthropic import AnthropicDialect
from insitu.gateway.dialects.base import Dialect, WireCall, WireError
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.dialects.gemini import GeminiDialect
from insitu.gateway.dialects.responses import ResponsesDialect
from insitu.gateway.host_tools import HostCall, HostTool, ToolBox
from insitu.gateway.listeners import Listener, listen_tcp, listen_unix
from insitu.gateway.rejected_calls import Refusals
from insitu.gateway.request import (
    GatewayConfig,
    GatewayCounters,
    MemoryBudget,
    MemoryShare,
    dialect_name,
    hints_of,
    read_body,
    read_json,
    secret_of,
)
from insitu.gateway.response_writer import CallReport, Delivery, json_response
from insitu.gateway.routes import Route, take_apart
from insitu.gateway.session import Session, secret_digest
from insitu.gateway.session_spec import SessionSpec
from insitu.gateway.text_tool_calls import ShimWatch, TextShim
from insitu.types import Limits

__all__ = ["CallReport", "Gateway", "GatewayConfig", "GatewayCounters", "Listener"]

log = logging.getLogger(__name__)

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (ChatDialect(), AnthropicDialect(), ResponsesDialect(), GeminiDialect())
}
"""Wire formats by the names that routes.py uses. A new one is one pure file and one entry here."""


class Gateway:
    """Async context manager; its listeners and sessions live inside."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        config: GatewayConfig | None = None,
        on_call: Callable[[CallReport], None] | None = None,
        say: Callable[[str], None] = log.warning,
        on_host_call: Callable[[Session, HostCall], None] | None = None,
    ) -> None:
        """`on_call` hears of every model call once it is over, `on_host_call` of every call of a host tool,
        `say` gets lines for the operator; they must not raise. Raises ConfigError when reasoning is to be
        dropped and the family's rules drop none."""
        self.config = config or GatewayConfig()
        self._asking = forgotten_before(renderer, self.config.keep_reasoning)
        self._shim_watch = ShimWatch(say)
        self.counters = GatewayCounters()
        self._on_call, self._on_host_call = on_call, on_host_call
        self._refusals = None if on_call is None else Refusals(on_call)
        self.intake = MemoryBudget(self.config.max_intake_bytes)
        """Of bodies that no session has taken on yet."""
        self._engine = engine
        self._renderer = renderer
        self._sessions: dict[bytes, Session] = {}
        self._tool_keys: dict[bytes, Session] = {}
        self._by_name: dict[str, Session] = {}
        """Open sessions by public id and by rollout id."""
        self._sealed: OrderedDict[bytes, None] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(session.abandon() for session in self.open_sessions()))
        if self._refusals is not None:
            self._refusals.close()

    def open_session(
        self,
        rollout_id: str,
        *,
        seed: int,
        limits: Limits,
        temperature: float = 1.0,
        max_call_tokens: int | None = None,
        listener: Path | None = None,
        tools: Sequence[HostTool] | None = None,
        shim: TextShim | None = None,
    ) -> Session:
        """A new session with its own secrets. With `listener`, only requests through that socket count.
        `tools` and `shim`: None = those of the configuration. Raises ConfigError for host tools that cannot
        be."""
        spec = SessionSpec(
            rollout_id=rollout_id,
            seed=seed,
            limits=limits,
            temperature=temperature,
            max_call_tokens=min(limits.max_call_tokens, max_call_tokens or limits.max_call_tokens),
            engine_deadline_s=self.config.engine_deadline_s,
            max_concurrent_calls=self.config.max_concurrent_calls,
            inline_chars=self.config.inline_chars,
            shim=shim or self.config.shim,
            train_auxiliary=self.config.auxiliary == "train",
            asking=self._asking,
        )
        session = Session(
            self._engine,
            self._renderer,
            spec,
            listener=listener,
            max_waiting_calls=self.config.max_waiting_calls,
            grace_s=self.config.disconnect_grace_s,
            on_sealed=self._retire,
            bodies=BodyCache(self.config.max_json_depth, self.config.max_json_items),
            tools=ToolBox(self.config.tools if tools is None else tools),
            log_dir=self.config.log_dir,
        )
        if self._on_host_call is not None:
            session.tools.on_call = functools.partial(self._on_host_call, session)
        self._sessions[session.secret_digest] = session
        self._tool_keys[session.tool_digest] = session
        self._by_name[session.public_id] = session
        self._by_name[rollout_id] = session
        return session

    def open_sessions(self) -> list[Session]:
        """In the order they were opened."""
        return list(self._sessions.values())

    def _retire(self, session: Session) -> None:
        self._sessions.pop(session.secret_digest, None)
        for name in (session.public_id, session.rollout_id):
            if self._by_name.get(name) is session:
                del self._by_name[name]
        self._tool_keys.pop(session.tool_digest, None)
        self._sealed[session.secret_digest] = None
        self._sealed[session.tool_digest] = None
        while len(self._sealed) > 2 * self.config.sealed_kept:
            self._sealed.popitem(last=False)

    # ----------------------------------------------------------------------- listeners

    def listen_unix(self, path: Path) -> AbstractAsyncContextManager[Listener]:
        """Serve agents through a unix socket. Raises SetupError."""
        return listen_unix(functools.partial(self._handle, path), path, self.config.max_connections)

    def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> AbstractAsyncContextManager[Listener]:
        """Serve agents on a TCP port; 0 takes a free one. Raises SetupError."""
        handle = functools.partial(self._handle, None)
        return listen_tcp(handle, host, port, self.config.max_connections)

    # ----------------------------------------------------------------------- requests

    async def _handle(self, listener: Path | None, http: web.BaseRequest) -> web.StreamResponse:
        response = await self._respond(listener, http)
        name_request(response)
        return response

    async def _respond(self, listener: Path | None, http: web.BaseRequest) -> web.StreamResponse:
        """The request boundary: every failure ends as an answer of the provider's shape."""
        self.counters.requests += 1
        route = take_apart(http.path)
        dialect = DIALECTS.get(dialect_name(http, route), DIALECTS["chat"])
        try:
            return await self._answer(listener, http, route, dialect)
        except WireError as error:
            sender = self._sender(http, route, listener)
            if sender is not None:
                sender.stats.rejections.add(error, route is not None and route.kind == "call")
            return self._refusal(dialect, error)
        except ConnectionResetError:
            self.counters.client_gone += 1
            return web.Response(
                status=499
            )  # nobody reads it; an exception would be logged as a fault of ours
        except asyncio.CancelledError:
            self.counters.client_gone += 1
            raise
        except Exception:  # the boundary; sessions keep their own failures
            self.counters.defects += 1
            log.exception("request failed path=%s", http.path)
            return self._refusal(dialect, WireError("engine_failed", "The gateway failed."))

    def _refusal(self, dialect: Dialect, error: WireError) -> web.Response:
        self.counters.refused += 1
        self.counters.unauthorized += error.cause == "unauthorized"
        response = json_response(dialect.error(error), error.status)
        if error.cause == "rate_limited":
            response.headers["Retry-After"] = "1"
        elif error.cause != "engine_failed":
            # The SDKs of two providers retry some of these otherwise.
            response.headers["x-should-retry"] = "false"
        return response

    async def _answer(
        self, listener: Path | None, http: web.BaseRequest, route: Route | None, dialect: Dialect
    ) -> web.StreamResponse:
        if http.path == "/health" or (route is not None and route.kind == "hello"):
            return json_response({"status": "ok"})
        if route is None or (route.dialect and route.dialect not in DIALECTS):
            raise WireError("not_found", f"Unknown request URL: {http.method} {http.path}.")
        try:
            session = self._authorise(route, http, listener)
            vouch(http)
        except WireError as error:
            if route.kind == "call":
                self._refused(dialect, error)
            raise
        if http.method not in route.methods:
            raise WireError("method_not_allowed", f"Not allowed: {http.method} {http.path}.")
        if route.kind == "models":
            return json_response(dialect.models(self.config.model_name))
        if route.kind == "model":
            return json_response(dialect.model(self.config.model_name))
        if route.kind == "exit":
            session.leave()
            return json_response({"status": "closed"})
        if route.scope == "tool":
            return await self._host_tool(http, route, session)
        return await self._serve(http, route, session, dialect)

    async def _host_tool(self, http: web.BaseRequest, route: Route, session: Session) -> web.Response:
        """A call of a host tool, or one message to its MCP server."""
        if route.kind == "tools":
            return json_response({"tools": mcp.listed(session.tools)})
        body = await read_json(http, self.config, self.config.max_tool_body_bytes)
        if route.kind == "tool":
            said = session.tools.call(route.action, body)
            return json_response(said, 200 if said["ok"] else 422)
        answer = mcp.answer(session.tools, body)
        return web.Response(status=202) if answer is None else json_response(answer)

    async def _serve(
        self, http: web.BaseRequest, route: Route, session: Session, dialect: Dialect
    ) -> web.StreamResponse:
        """A model call or a token count."""
        try:
            wire, name = await self._read(http, route, session, dialect)
            if route.kind == "count":
                return json_response(dialect.count(await session.count_tokens(wire.request)))
            self._shim_watch.saw(session.shim, wire.request.tools)
            hints = hints_of(http)
            request = replace(wire.request, hints=wire.request.hints + hints) if hints else wire.request
            call = session.admit(name, request)
        except WireError as error:
            if route.kind == "call":
                self._refused(dialect, error, session)
            raise
        delivery = Delivery(
            http=http,
            config=self.config,
            counters=self.counters,
            session=session,
            call=call,
            dialect=dialect,
            wire=wire,
        )
        return await self._reported(delivery)

    async def _read(
        self, http: web.BaseRequest, route: Route, session: Session, dialect: Dialect
    ) -> tuple[WireCall, BodyName]:
        query = f"?{http.query_string}" if http.query_string else ""
        with MemoryShare(self.intake) as share:
            most = min(self.config.max_body_bytes, session.max_body_bytes)
            raw = await read_body(http, self.config, most, share)
            return await session.bodies.read(dialect, raw, route.action + query)

    def _refused(self, dialect: Dialect, error: WireError, session: Session | None = None) -> None:
        """A model call that got no turn."""
        if self._refusals is not None:
            rollout_id, dead = (session.rollout_id, session.dead) if session else ("", "")
            self._refusals.add(rollout_id, dialect.name, error.cause, dead)

    async def _reported(self, delivery: Delivery) -> web.StreamResponse:
        failure = "client gone"
        try:
            response, failure = await delivery.run()
        except WireError as error:
            failure = error.cause
            raise
        finally:
            if self._on_call is not None:
                self._on_call(delivery.report(failure))
        return response

    def _sender(self, http: web.BaseRequest, route: Route | None, listener: Path | None) -> Session | None:
        """The session of the agent that sent a refused request: by its key, its path or its sandbox's
        socket."""
        session = self._sessions.get(secret_digest(secret_of(http) or ""))
        if session is None and route is not None and route.public_id is not None:
            session = self._by_name.get(route.public_id)
        if session is None and listener is not None:
            session = next((one for one in self._sessions.values() if one.listener == listener), None)
        return session

    def _authorise(self, route: Route, http: web.BaseRequest, listener: Path | None) -> Session:
        """The session whose secret the request carries; path and secret must agree. Raises WireError."""
        secret = secret_of(http)
        if secret is None:
            raise WireError("unauthorized", "You didn't provide an API key.")
        digest = secret_digest(secret)
        known = self._tool_keys if route.scope == "tool" else self._sessions
        session = known.get(digest)
        if session is None and digest in self._sealed:
            raise WireError("session_closed", "This session is closed.")
        if session is None or not session.owns(secret, listener, route.scope):
            raise WireError("unauthorized", "Incorrect API key provided.")
        if route.public_id is not None and self._by_name.get(route.public_id) is not session:
            raise WireError("unauthorized", "Incorrect API key provided.")
        return session
