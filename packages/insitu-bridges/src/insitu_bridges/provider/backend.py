"""Sessions whose calls are forwarded to a provider, byte for byte, and recorded as text.

    agent --session's secret--> gateway --operator's key--> the one configured origin

For teachers and baselines: there are no tokens, so nothing can be trained. Only model routes are forwarded,
only to the configured base URL and model, without redirects or unlisted headers. Calls, tokens and cost are
counted; limits end in errors of the provider's format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from insitu.engines.http import checked_url
from insitu.errors import ConfigError, EngineUnavailable, GatewayError
from insitu.gateway.backend import ServerState
from insitu.gateway.body_parser import INLINE_BYTES
from insitu.gateway.dialects.base import Dialect, WireError
from insitu.gateway.request import read_body, too_many_values
from insitu.gateway.routes import Route
from insitu.gateway.session import Session, SessionSpec
from insitu.gateway.text_log import Spent, TextRecord, record_path
from insitu.types import Ledger, Trajectory
from insitu_bridges.provider.call import ProviderCall, reason_of
from insitu_bridges.provider.faults import FaultLog, SessionFaults
from insitu_bridges.provider.limits import Outage, ProviderOptions, RateLimiter

_ACTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


def _plain(action: str) -> bool:
    """Return whether the path stays below the version: no dot segment, no query, nothing to decode."""
    return _ACTION.fullmatch(action) is not None and not any(p in (".", "..") for p in action.split("/"))


async def checked_model(route: Route, body: bytes, model: str, max_items: int) -> None:
    """Run `_check_model`, in a worker thread when the body is long.

    Raises WireError, also for a body with more than `max_items` values.
    """

    def check() -> None:
        if too_many_values(body, max_items):
            raise WireError("invalid_request", "The request body has too many items.")
        _check_model(route, body, model)

    if len(body) <= INLINE_BYTES:
        check()
    else:
        await asyncio.to_thread(check)


def _check_model(route: Route, body: bytes, model: str) -> None:
    """Raise WireError unless the request names the configured model, once, and no other.

    Names of top-level fields are compared without case, and a repeated one is refused: parsers differ in
    which they take. `models` is the list of fallback models of routing providers.
    """
    if route.dialect == "gemini":
        named: list[object] = [route.action.removeprefix("models/").rpartition(":")[0]]
        named += [str(value).removeprefix("models/") for value in _named(body)]
    else:
        named = _named(body)
        if len(named) != 1:
            raise WireError("invalid_request", f"model must be named once, as {model}.", "model")
    if any(name != model for name in named):
        raise WireError("not_found", f"The model does not exist here; ask for {model}.", "model")


def _named(body: bytes) -> list[object]:
    """Return the values of every top-level field that names a model. Raises WireError."""
    try:
        text = body.decode("utf-8")
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise WireError("invalid_request", "The body is not JSON.") from error
    # An object became a list of pairs; only a body that is an object begins with a brace.
    if not text.lstrip().startswith("{"):
        raise WireError("invalid_request", "The body must be a JSON object.")
    return [value for name, value in pairs if name.casefold() in ("model", "models")]


ASIDES_PER_CALL = 10
"""Token counts and model lists that a session may request for each model call it may make. They cost nothing,
but each has a line in the record."""


class ProviderBackend:
    """Opens sessions over one provider; made by `open_provider`."""

    def __init__(self, client: aiohttp.ClientSession, options: ProviderOptions, records: Path) -> None:
        self.spent = Spent()
        """Over all sessions."""
        self.outage: Outage
        self.faults = FaultLog()
        self.client, self.options, self._records = client, options, records
        self.base = checked_url(options.url, "engine.urls")
        self.rate = RateLimiter(
            requests_per_minute=options.requests_per_minute, max_concurrent=options.max_concurrent
        )
        self.server: ServerState

    def connect(self, server: ServerState) -> None:
        self.server = server
        self.outage = Outage(self.options.url, self.options.max_wait_s, server.log_line)

    @property
    def cost_reached(self) -> bool:
        """Whether every further call is refused."""
        return bool(self.options.max_cost) and self.spent.cost >= self.options.max_cost

    async def check(self) -> None:
        """Raise GatewayError at the cost limit, EngineUnavailable during an outage of the provider."""
        if self.cost_reached:
            raise GatewayError(f"the cost limit is reached (engine.max_cost {self.options.max_cost:g})")
        self.outage.check()

    def serves(self, route: Route) -> bool:
        return route.scope == "agent" and _plain(route.action)

    def open_session(self, spec: SessionSpec, on_sealed: Callable[[Session], None]) -> ProviderSession:
        if spec.tools.tools:
            raise ConfigError(
                "host tools need an engine: a provider's request bodies are forwarded unchanged"
            )
        record = TextRecord(record_path(self._records, spec.rollout_id), spec.rollout_id)
        return ProviderSession(spec, on_sealed, self, record)


class ProviderSession(Session):
    """A session over a provider. Its wall time is limited by the agent's own timeout only."""

    def __init__(
        self,
        spec: SessionSpec,
        on_sealed: Callable[[Session], None],
        backend: ProviderBackend,
        record: TextRecord,
    ) -> None:
        super().__init__(spec, on_sealed)
        self.backend, self.server, self.record = backend, backend.server, record
        self.faults = SessionFaults(backend.faults, self.stats)
        self.turns = self.asides = 0
        """Admitted model calls and other requests."""
        self._running: set[asyncio.Task[Any]] = set()

    async def answer(self, http: web.BaseRequest, route: Route, dialect: Dialect) -> web.StreamResponse:
        """Forward a request. Its body is held in memory until it is over: it may be sent again."""
        with self.server.intake.share() as reserve:
            came = time.monotonic()
            async with self.faults.place():
                try:
                    self.check_open()
                    body = await self._read(http, route, reserve)
                    call = ProviderCall(
                        session=self, http=http, route=route, dialect=dialect, body=body, came=came
                    )
                    await self._admit(call)
                except WireError as error:
                    if route.kind == "call":
                        self.server.reports.refused(self.rollout_id, dialect.name, error.cause)
                    raise
                return await self._forward(call)

    async def _read(self, http: web.BaseRequest, route: Route, reserve: Callable[[int], None]) -> bytes:
        """Return the body; it asks for the configured model. Raises WireError."""
        config = self.server.config
        body = await read_body(http, config, reserve=reserve) if http.method == "POST" else b""
        if route.kind in ("call", "count"):
            await checked_model(route, body, self.backend.options.model, config.max_json_items)
        return body

    async def _admit(self, call: ProviderCall) -> None:
        """Wait for the rate limits, and number the call; it holds a place of the rate limiter.

        Raises WireError.
        """
        route = call.route
        self._check_limits(route)
        try:
            await call.enter()
        except WireError as error:
            call.trouble = str(error)
            self._judge(call)
            raise
        try:
            self._check_limits(route)
        except WireError:
            self.backend.rate.leave()
            raise
        call.turn = self.turns + self.asides
        if route.kind == "call":
            self.turns += 1
        else:
            self.asides += 1

    async def _forward(self, call: ProviderCall) -> web.StreamResponse:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._running.add(task)
        try:
            return await call.run()
        finally:
            self._judge(call)
            # Also when the agent has gone: the provider bills what it sampled until then.
            try:
                await asyncio.shield(self._account(call))
            finally:
                self._running.discard(task)

    def _judge(self, call: ProviderCall | None = None) -> None:
        """Say whose fault the unanswered calls of the session are, the one that has ended included."""
        if call is not None and call.route.kind == "call":
            self.faults.ended(
                call.came,
                answered=call.answered,
                cause=call.trouble,
                surely=call.surely,
                load=call.throttled,
            )
        stats = self.stats
        stats.infra_error = (self.backend.cost_reached and stats.infra_error) or self.faults.fault()

    def _check_limits(self, route: Route) -> None:
        self.check_open()
        stats, limits = self.stats, self.spec.limits
        if self.backend.cost_reached:
            stats.infra_error = "the cost limit of this run is reached"
            raise WireError("session_failed", "The cost limit of this run is reached. Stop here.")
        if self.tools.ended:
            raise WireError("session_closed", "The answer was accepted. Stop here.")
        budget = next((name for name, out in self.used_up(self.turns).items() if out), "")
        if budget:
            if route.kind == "call":
                stats.budget_stop = stats.budget_stop or budget
            what = "call" if budget == "calls" else "token"
            raise WireError("session_failed", f"The {what} limit of this session is reached. Stop here.")
        if route.kind != "call" and self.asides >= ASIDES_PER_CALL * limits.max_calls:
            raise WireError("session_failed", "This session has asked for too many token counts. Stop here.")

    async def _account(self, call: ProviderCall) -> None:
        """Count, record and report a finished call."""
        usage = call.usage()
        cost = self.backend.options.prices.cost(usage)
        if call.route.kind == "call":
            for spent in (self.backend.spent, self.stats):
                spent.add(usage, cost)
        await self.record.append(call.logged(usage, cost))
        if call.route.kind == "call":
            self.server.reports.report(call.report(usage, cost))

    async def _drain(self, deadline_s: float) -> None:
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=deadline_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=max(1.0, deadline_s))
        self._judge()

    def _trajectory(self) -> Trajectory:
        """Return an empty trajectory: there are no tokens."""
        return Trajectory(segments=(), turns=(), ledger=Ledger())


@asynccontextmanager
async def open_provider(options: ProviderOptions, records: Path) -> AsyncIterator[ProviderBackend]:
    """Open connections to a provider whose sessions each have a file in `records`.

    Raises ConfigError for a bad URL.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_deadline_s)
    connector = aiohttp.TCPConnector(limit=options.max_concurrent, keepalive_timeout=10.0)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, trust_env=False, auto_decompress=False, cookie_jar=jar
    ) as client:
        yield ProviderBackend(client, options, records)


async def check_reachable(url: str, deadline_s: float) -> None:
    """Connect once and send nothing, to find a wrong address before any sandbox starts.

    Raises EngineUnavailable.
    """
    address = urlsplit(url)
    secure = address.scheme == "https"
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(
                address.hostname, address.port or (443 if secure else 80), ssl=secure or None
            )
    except (OSError, TimeoutError) as error:
        why = f"timeout after {deadline_s:g} s" if isinstance(error, TimeoutError) else reason_of(error)
        raise EngineUnavailable(f"engine.urls: the provider at {url} cannot be reached: {why}") from error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
