"""The gateway: one asyncio HTTP server that agents use as their model provider.

A request is routed by its path, authorised by its secret and answered by its session, whose backend samples
tokens or forwards to a provider. The agent's secret opens model routes only, the tool secret host tools only;
the admin API has a listener and a secret of its own (admin.py).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from insitu.gateway.backend import CallReport, CallReporter, ServerState, SessionBackend
from insitu.gateway.connection import json_response, mark_known, name_request
from insitu.gateway.dialects.anthropic import AnthropicDialect
from insitu.gateway.dialects.base import Dialect, WireError
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.dialects.gemini import GeminiDialect
from insitu.gateway.dialects.responses_output import ResponsesDialect
from insitu.gateway.host_tools import HostCall, HostTool, ToolBox, listed_tools, mcp_answer
from insitu.gateway.listeners import Listener, listen_tcp, listen_unix
from insitu.gateway.request import (
    GatewayConfig,
    GatewayCounters,
    MemoryBudget,
    dialect_name,
    read_json,
    secret_of,
)
from insitu.gateway.routes import Route, parse_path
from insitu.gateway.session import Session, SessionSpec, secret_digest
from insitu.gateway.text_tool_calls import TextShim
from insitu.types import Limits

log = logging.getLogger(__name__)

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (ChatDialect(), AnthropicDialect(), ResponsesDialect(), GeminiDialect())
}
"""Wire formats by the names that routes.py uses. A new one is one pure file and one entry here."""


class Gateway:
    """Sessions over one backend and the listeners for their agents; an async context manager."""

    def __init__(
        self,
        backend: SessionBackend,
        config: GatewayConfig | None = None,
        on_call: Callable[[CallReport], None] = lambda report: None,
        log_line: Callable[[str], None] = log.warning,
        on_host_call: Callable[[Session, HostCall], None] | None = None,
    ) -> None:
        """Take callbacks for finished model calls, lines for the operator, and calls of host tools.

        The callbacks must not raise. Raises ConfigError when the backend does not support the configuration.
        """
        self.config = config or GatewayConfig()
        self.counters = GatewayCounters()
        self.intake = MemoryBudget(self.config.max_intake_bytes)
        self.reports = CallReporter(on_call)
        self._backend, self._on_host_call = backend, on_host_call
        self._proof_key = secrets.token_bytes(32)
        backend.connect(
            ServerState(
                config=self.config,
                counters=self.counters,
                intake=self.intake,
                reports=self.reports,
                log_line=log_line,
            )
        )
        self._sessions: dict[bytes, Session] = {}
        self._tool_keys: dict[bytes, Session] = {}
        self._by_name: dict[str, Session] = {}
        """Open sessions by public id and by rollout id."""
        self._sealed: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the secrets of sealed sessions, latest last."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(session.abandon() for session in self.open_sessions()))
        self.reports.close()
        if self.config.hook:
            self.config.hook.close()

    def open_session(
        self,
        rollout_id: str,
        *,
        seed: int = 0,
        limits: Limits,
        temperature: float = 1.0,
        max_call_tokens: int | None = None,
        listener: Path | None = None,
        tools: Sequence[HostTool] | None = None,
        shim: TextShim | None = None,
    ) -> Session:
        """Return a new session with its own secrets.

        With `listener`, only requests through that socket are accepted. `tools` and `shim`: None = those of
        the configuration. Raises ConfigError for invalid host tools.
        """
        spec = SessionSpec(
            rollout_id=rollout_id,
            seed=seed,
            limits=limits,
            temperature=temperature,
            max_call_tokens=min(limits.max_call_tokens, max_call_tokens or limits.max_call_tokens),
            tools=ToolBox(self.config.tools if tools is None else tools),
            listener=listener,
            shim=shim or self.config.shim,
        )
        session = self._backend.open_session(spec, self._retire)
        if self._on_host_call is not None:
            session.tools.on_call = functools.partial(self._on_host_call, session)
        self._sessions[session.secret_digest] = session
        self._tool_keys[session.tool_digest] = session
        self._by_name[session.public_id] = session
        self._by_name[rollout_id] = session
        return session

    def proof(self, nonce: str) -> str:
        """Return what this gateway alone answers at `/health?nonce=`."""
        return hmac.digest(self._proof_key, nonce.encode(errors="replace"), "sha256").hex()

    def open_sessions(self) -> list[Session]:
        """Return the sessions that are not sealed, in the order they were opened."""
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
        """Answer every failure in the provider's error format: the request boundary."""
        self.counters.requests += 1
        route = parse_path(http.path)
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
            http.protocol.force_close()  # what was written of an answer must not look complete
            # aiohttp would log an exception as a defect.
            return web.Response(status=499)
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
        name_request(response, error.id)
        if error.cause == "rate_limited":
            response.headers["Retry-After"] = "1"
        elif error.cause != "engine_failed":
            # The SDKs of two providers retry some of these otherwise.
            response.headers["x-should-retry"] = "false"
        return response

    async def _answer(
        self, listener: Path | None, http: web.BaseRequest, route: Route | None, dialect: Dialect
    ) -> web.StreamResponse:
        if http.path in ("/health", "/healthz") or (route is not None and route.kind == "hello"):
            nonce = http.query.get("nonce")
            return json_response({"status": "ok"} | ({"proof": self.proof(nonce)} if nonce else {}))
        if route is None or not self._backend.serves(route):
            raise WireError("not_found", f"Unknown request URL: {http.method} {http.path}.")
        try:
            session = self._authorise(route, http, listener)
        except WireError as error:
            if route.kind == "call":
                self.reports.refused("", dialect.name, error.cause)
            raise
        mark_known(http)
        if http.method not in route.methods:
            if route.kind == "model" and ":" in route.action:  # a method of Gemini's that is not served
                raise WireError("not_found", f"Unknown request URL: {http.method} {http.path}.")
            raise WireError("method_not_allowed", f"Not allowed: {http.method} {http.path}.")
        if route.kind == "exit":
            session.leave()
            return json_response({"status": "closed"})
        if route.scope == "tool":
            return await self._host_tool(http, route, session)
        return await session.answer(http, route, dialect)

    async def _host_tool(self, http: web.BaseRequest, route: Route, session: Session) -> web.Response:
        """Answer a call of a host tool, or one message to its MCP server."""
        if route.kind == "tools":
            return json_response({"tools": listed_tools(session.tools)})
        body = await read_json(http, self.config, self.config.max_tool_body_bytes)
        if route.kind == "tool":
            result = session.tools.call(route.action, body)
            return json_response(result, 200 if result["ok"] else 422)
        answer = mcp_answer(session.tools, body)
        return web.Response(status=202) if answer is None else json_response(answer)

    def _sender(self, http: web.BaseRequest, route: Route | None, listener: Path | None) -> Session | None:
        """Return the session of a rejected request's agent, by its key, path or the sandbox's socket."""
        session = self._sessions.get(secret_digest(secret_of(http) or ""))
        if session is None and route is not None and route.public_id is not None:
            session = self._by_name.get(route.public_id)
        if session is None and listener is not None:
            session = next((one for one in self._sessions.values() if one.listener == listener), None)
        return session

    def _authorise(self, route: Route, http: web.BaseRequest, listener: Path | None) -> Session:
        """Return the session whose secret the request carries; path and secret must agree.

        Raises WireError.
        """
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
