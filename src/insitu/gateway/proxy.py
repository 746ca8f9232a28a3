"""The black box: an agent's requests go to a provider as they are, and its answers come back as they are.

    agent ──secret of ours──► ProviderProxy ──operator's key──► the one configured origin

For teachers and baselines: calls are kept as text, nothing is ever trainable. Only model routes are
forwarded, only to the configured base URL and model, without redirects or unlisted headers.
Calls, tokens and cost are counted; limits end in errors of the provider's shape. Callers: serve, collect.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from insitu.engines.http import checked_url
from insitu.errors import GatewayError
from insitu.gateway.connection import vouch
from insitu.gateway.dialects.base import Dialect, WireError
from insitu.gateway.listeners import Listener, listen_tcp, listen_unix
from insitu.gateway.model_check import checked_model, plain
from insitu.gateway.outage import AWAY, Outage
from insitu.gateway.provider_call import ProviderBusy, ProviderCall, cut, raise_busy
from insitu.gateway.provider_session import Budgets, ProviderSession, Spent, UpstreamOptions, record_name
from insitu.gateway.rate_limit import BUSY, RateLimiter
from insitu.gateway.request import (
    GatewayConfig,
    MemoryBudget,
    MemoryShare,
    dialect_name,
    read_body,
    secret_of,
)
from insitu.gateway.response_writer import json_response
from insitu.gateway.routes import Route, take_apart
from insitu.gateway.server import DIALECTS
from insitu.gateway.session import secret_digest
from insitu.gateway.text_log import TextCall, TextRecord

log = logging.getLogger(__name__)

SENT_ON = (
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "content-type",
    "openai-beta",
    "x-goog-api-client",
)
"""Headers of the agent that the provider needs to understand the body."""
SENT_BACK = re.compile(
    r"content-type|retry-after|(x-)?request-id|x-should-retry|(anthropic|x)-ratelimit-.*", re.I
)


class ProviderProxy:
    """Make one with `open_proxy`."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        options: UpstreamOptions,
        records: Path,
        config: GatewayConfig,
        on_call: Callable[[str, TextCall], None] | None,
        say: Callable[[str], None],
    ) -> None:
        self.outage = Outage(options.url, options.max_wait_s, say)
        self.spent = Spent()
        """Over all sessions."""
        self._on_call = on_call
        self._client, self._options, self._records, self._config = client, options, records, config
        self._base = checked_url(options.url, "engine.url")
        self._sessions: dict[bytes, ProviderSession] = {}
        self._sealed: dict[bytes, None] = {}
        """Digests of keys whose sessions are over, latest last."""
        self.intake = MemoryBudget(self._config.max_intake_bytes)
        """Of calls that wait for their turn or for their answer, too: they hold their bodies until then."""
        self._pace = RateLimiter(
            requests_per_minute=options.requests_per_minute,
            max_concurrent=options.max_concurrent,
            max_wait_s=options.max_wait_s,
        )

    @property
    def cost_reached(self) -> bool:
        """Every call is refused from now on."""
        return bool(self._options.max_cost) and self.spent.cost >= self._options.max_cost

    def open_session(
        self, rollout_id: str, *, budgets: Budgets, listener: Path | None = None, name: str = ""
    ) -> ProviderSession:
        """A new session with its own secret. With `listener`, only requests through that socket count.
        `name`: of its record's file; empty = as the rollout."""
        record = TextRecord(self._records / f"{name or record_name(rollout_id)}.jsonl", rollout_id)
        session = ProviderSession(rollout_id, record, budgets, listener, self._retire)
        self._sessions[session.digest] = session
        return session

    def _retire(self, session: ProviderSession) -> None:
        """Of what is sealed only the key is remembered, and of the latest."""
        del self._sessions[session.digest]
        self._sealed[session.digest] = None
        while len(self._sealed) > self._config.sealed_kept:
            del self._sealed[next(iter(self._sealed))]

    def listen_unix(self, path: Path) -> AbstractAsyncContextManager[Listener]:
        """Serve agents through a unix socket. Raises SetupError."""
        return listen_unix(functools.partial(self._handle, path), path)

    def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> AbstractAsyncContextManager[Listener]:
        """Serve agents on a TCP port; 0 takes a free one. Raises SetupError."""
        return listen_tcp(functools.partial(self._handle, None), host, port)

    # ----------------------------------------------------------------------- requests

    async def _handle(self, listener: Path | None, http: web.BaseRequest) -> web.StreamResponse:
        """The request boundary: every failure of ours ends as an answer of the provider's shape."""
        route = take_apart(http.path)
        dialect = _dialect(http, route)
        try:
            return await self._answer(listener, http, route)
        except WireError as error:
            sender = self._sender(http, listener)
            if sender is not None:
                sender.rejections.add(error, route is not None and route.kind == "call")
            return _refusal(dialect, error)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:  # the boundary
            log.exception("pass-through failed path=%s", http.path)
            return _refusal(dialect, WireError("engine_failed", "The gateway failed."))

    async def _answer(
        self, listener: Path | None, http: web.BaseRequest, route: Route | None
    ) -> web.StreamResponse:
        if http.path == "/health" or (route is not None and route.kind == "hello"):
            return json_response({"status": "ok"})
        if route is None or route.scope != "agent" or not plain(route.action):
            raise WireError("not_found", f"Unknown request URL: {http.method} {http.path}.")
        session = self._authorise(route, http, listener)
        vouch(http)
        if http.method not in route.methods:
            raise WireError("method_not_allowed", f"Not allowed: {http.method} {http.path}.")
        if route.kind == "exit":
            session.left = True
            return json_response({"status": "closed"})
        with MemoryShare(self.intake) as share:
            body = await read_body(http, self._config, share=share) if http.method == "POST" else b""
            if route.kind in ("call", "count"):
                await checked_model(route, body, self._options.model, self._config.max_json_items)
            return await self._pass_on(http, route, session, body)

    async def _pass_on(
        self, http: web.BaseRequest, route: Route, session: ProviderSession, body: bytes
    ) -> web.StreamResponse:
        """When its turn has come. Raises WireError."""
        # Agents ask again by themselves: each time with all the patience would be for ever.
        ends = time.monotonic() + (0.0 if self.outage.over else self._options.max_wait_s)
        turn = await self._admit(session, route, ends)
        call = ProviderCall(session=session, turn=turn, route=route, request=body)
        task = _current_task()
        session.under_way.add(task)
        try:
            return await self._until_answered(http, call, ends)
        finally:
            session.trouble = "" if call.answered else call.trouble or session.trouble
            # Also when the agent left: what was sampled until then was paid for.
            try:
                await asyncio.shield(self._account(call))
            finally:
                session.under_way.discard(task)

    def _sender(self, http: web.BaseRequest, listener: Path | None) -> ProviderSession | None:
        """The session of the agent that sent a refused request: by its key or its sandbox's socket."""
        session = self._sessions.get(secret_digest(secret_of(http) or ""))
        if session is None and listener is not None:
            session = next((one for one in self._sessions.values() if one.listener == listener), None)
        return session

    def _authorise(self, route: Route, http: web.BaseRequest, listener: Path | None) -> ProviderSession:
        secret = secret_of(http)
        if secret is None:
            raise WireError("unauthorized", "You didn't provide an API key.")
        session = self._sessions.get(secret_digest(secret))
        if session is None and secret_digest(secret) in self._sealed:
            raise WireError("session_closed", "This session is closed.")
        right = session is not None and hmac.compare_digest(session.digest, secret_digest(secret))
        if (
            session is None
            or not right
            or (listener is not None and session.listener not in (None, listener))
        ):
            raise WireError("unauthorized", "Incorrect API key provided.")
        if route.public_id not in (None, session.public_id, session.rollout_id):
            raise WireError("unauthorized", "Incorrect API key provided.")
        if session.closed or (session.left and route.kind != "exit"):
            raise WireError("session_closed", "This session is closed.")
        return session

    async def _admit(self, session: ProviderSession, route: Route, ends: float) -> int:
        """The request's ordinal in its session; it holds a place of the pace. Raises WireError at a limit."""
        self._check_limits(session, route)
        began = time.monotonic()
        try:
            await self._pace.enter(ends)
        except WireError as error:
            session.trouble = str(error)
            raise
        finally:
            session.waited_s += time.monotonic() - began
        try:
            self._check_limits(session, route)
        except WireError:
            self._pace.leave()
            raise
        return session.admitted(route)

    def _check_limits(self, session: ProviderSession, route: Route) -> None:
        if session.closed:
            raise WireError("session_closed", "This session is closed.")
        if self.cost_reached:
            session.trouble = "the cost limit of this run is reached"
            raise WireError("session_failed", "The cost limit of this run is reached. Stop here.")
        session.check(route)

    async def _until_answered(
        self, http: web.BaseRequest, call: ProviderCall, ends: float
    ) -> web.StreamResponse:
        """Send it, again where the provider is busy and there is patience left. The place is held on entry
        and given back."""
        while True:
            try:
                return await self._forward(http, call, ends)
            except ProviderBusy as busy:
                self._pace.hold(busy.pause_s)
            finally:
                self._pace.leave()
            began = time.monotonic()
            try:
                await self._pace.enter(ends)
            finally:
                call.session.waited_s += time.monotonic() - began

    async def _forward(self, http: web.BaseRequest, call: ProviderCall, ends: float) -> web.StreamResponse:
        """Raises Busy when it is worth while to ask again, and the agent has not heard anything yet."""
        call.sent += 1
        call.status, call.held = 0, True
        try:
            async with (
                asyncio.timeout(self._options.call_deadline_s),
                self._client.request(
                    http.method,
                    self._target(http, call.route),
                    data=call.request or None,
                    headers=self._headers(http, call.route),
                    allow_redirects=False,
                ) as answer,
            ):
                call.status, call.held = answer.status, False
                if answer.status in AWAY:
                    self.outage.failed(f"HTTP {answer.status}")
                else:
                    self.outage.answered()
                if answer.status in BUSY:
                    call.trouble = f"the provider answered HTTP {answer.status}"
                    self._stop_when_over(answer.status in AWAY)
                    raise_busy(answer.headers, call.sent, ends)
                elif answer.status in (401, 402, 403):
                    call.trouble = f"the provider refused the key: HTTP {answer.status}"
                return await self._stream_back(http, answer, call)
        except aiohttp.ClientError as error:  # also a connection that was not made in time
            log.warning("provider failed path=%s error=%s", call.path, type(error).__name__)
            call.trouble = "the provider could not be reached"
            if call.begun:  # it was there, or the agent left
                raise ConnectionResetError("The connection to the provider broke.") from error
            call.status, call.held = 0, False
            self.outage.failed(reason_of(error))
            self._stop_when_over()
            raise_busy({}, call.sent, ends)
            raise WireError("engine_failed", "The provider could not be reached.") from error
        except TimeoutError as error:
            call.trouble = "the provider did not answer in time"
            raise cut(call, "The provider did not answer in time.") from error

    def _stop_when_over(self, away: bool = True) -> None:
        """Raises WireError, in a way that no agent retries, once nobody waits for the provider any more."""
        if away and self.outage.over:
            raise WireError("session_failed", "The provider is away. Stop here.")

    async def _stream_back(
        self, http: web.BaseRequest, answer: aiohttp.ClientResponse, call: ProviderCall
    ) -> web.StreamResponse:
        """Every byte as it comes. After the first one an error can only be a broken connection."""
        response = web.StreamResponse(status=answer.status)
        for name, value in answer.headers.items():
            if SENT_BACK.fullmatch(name):
                response.headers[name] = value
        # An answer that is whole stays whole: the simplest clients read no chunks.
        response.content_length = answer.content_length
        call.begun = True
        await self._bounded(response.prepare(http))
        async for chunk in answer.content.iter_any():
            call.keep(chunk)
            await self._bounded(response.write(chunk))
        await self._bounded(response.write_eof())
        call.complete = True
        return response

    async def _bounded(self, writing: object) -> None:
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await writing  # type: ignore[misc]
        except TimeoutError as error:
            raise ConnectionResetError("the agent does not read its reply") from error

    def _target(self, http: web.BaseRequest, route: Route) -> str:
        version = "v1beta" if route.dialect == "gemini" or "/v1beta/" in http.path else "v1"
        alt = "?alt=sse" if http.query.get("alt") == "sse" else ""
        return f"{self._base}/{version}/{route.action}{alt}"

    def _headers(self, http: web.BaseRequest, route: Route) -> Mapping[str, str]:
        """The listed ones of the agent's, and the operator's key where this provider looks for it."""
        sent = {name: http.headers[name] for name in SENT_ON if name in http.headers}
        # The answer is handed on byte for byte, so it must not be packed for us.
        sent["Accept-Encoding"] = "identity"
        if not self._options.key:
            return sent
        name = {"anthropic": "x-api-key", "gemini": "x-goog-api-key"}.get(_dialect(http, route).name)
        return sent | (
            {name: self._options.key} if name else {"Authorization": f"Bearer {self._options.key}"}
        )

    async def _account(self, call: ProviderCall) -> None:
        """Count and record a call that is over."""
        usage = call.usage()
        cost = self._options.prices.cost(usage)
        if call.route.kind == "call":
            for spent in (self.spent, call.session.spent):
                spent.add(usage, cost)
        over = TextCall(
            turn=call.turn,
            path=call.path,
            status=call.status,
            complete=call.complete,
            request=call.request,
            reply=bytes(call.reply),
            truncated=call.dropped > 0,
            usage=usage,
            cost=cost,
            ms=(time.monotonic() - call.started) * 1000,
        )
        await call.session.record.append(over)
        if self._on_call is not None:
            self._on_call(call.session.rollout_id, over)


def reason_of(error: Exception) -> str:
    """Of a connection that could not be made."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise GatewayError("a request is handled outside of any task")
    return task


def _dialect(http: web.BaseRequest, route: Route | None) -> Dialect:
    return DIALECTS.get(dialect_name(http, route), DIALECTS["chat"])


def _refusal(dialect: Dialect, error: WireError) -> web.Response:
    response = json_response(dialect.error(error), error.status)
    if error.cause == "rate_limited":
        response.headers["Retry-After"] = "1"
    elif error.cause != "engine_failed":
        response.headers["x-should-retry"] = "false"
    return response


@asynccontextmanager
async def open_proxy(
    options: UpstreamOptions,
    records: Path,
    config: GatewayConfig | None = None,
    on_call: Callable[[str, TextCall], None] | None = None,
    say: Callable[[str], None] = log.warning,
) -> AsyncIterator[ProviderProxy]:
    """The connections to the provider and the sessions over them, each with a file of its own in `records`.

    `on_call` gets the rollout and the end of every call, `say` a line when the provider is away or back.
    Raises ConfigError for a bad URL.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_deadline_s)
    connector = aiohttp.TCPConnector(limit=options.max_concurrent, keepalive_timeout=10.0)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, trust_env=False, auto_decompress=False, cookie_jar=jar
    ) as client:
        through = ProviderProxy(client, options, records, config or GatewayConfig(), on_call, say)
        try:
            yield through
        finally:
            for session in list(through._sessions.values()):
                if not session.closed:
                    await session.seal(0.0)
