"""Sessions whose calls are sampled by an engine: every token is kept in the session's forest.

A session knows what its calls share: which are running, the budgets and places at the engine that they take,
and what the engine's failures mean. `token_call.py` is one call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from insitu.capture.forest import Forest
from insitu.chat.renderer import ChatRenderer, forgotten_before
from insitu.engines.base import Engine, TracksSessions
from insitu.errors import EngineError, EngineUnavailable, RenderError
from insitu.gateway.backend import ServerState
from insitu.gateway.body_parser import BodyParser, canonical_digest
from insitu.gateway.connection import json_response
from insitu.gateway.deadlines import QueueTimeout, SessionClock
from insitu.gateway.dialects.base import Dialect, ParsedBody, WireError
from insitu.gateway.prompt_ids import CHARS_PER_TOKEN, counted, overflow, unrenderable
from insitu.gateway.reply_checks import ReplyChecks
from insitu.gateway.request import hints_of, read_body
from insitu.gateway.routes import Route
from insitu.gateway.session import Session, SessionSpec
from insitu.gateway.text_tool_calls import not_offered
from insitu.gateway.token_call import TokenCall
from insitu.storage.session_log import LogFile, LoggedForest
from insitu.types import ModelRequest, Reply, Trajectory

MAX_OUTAGES = 4
"""Consecutive engine failures after which the session has failed for good; calls that were running at the
same time fail as one."""
MAX_STOPS = 16
"""Synthetic replies before an agent that does not stop is refused: its summaries and titles need some."""
MAX_REFUSALS = 256
"""Calls in a row refused as too many before the session is stopped, which ends a storm of retries."""
BYTES_PER_CHAR = 6
"""Size of an escaped character."""
MIN_BODY_LIMIT = 32 << 20
"""Images are part of a body and not of the prompt; providers take bodies of this size."""
_NO_THRESHOLD = (
    "an agent asks its provider to compact from a number of tokens on (context_management), which is recorded"
    " and not done: without another compaction its session ends at model.max_context_tokens"
)


class TokenBackend:
    """Opens sessions over one engine."""

    def __init__(self, engine: Engine, renderer: ChatRenderer) -> None:
        self.engine, self.renderer = engine, renderer
        self.server: ServerState
        self._reset_roles: frozenset[str]

    def connect(self, server: ServerState) -> None:
        """Raise ConfigError when reasoning is to be dropped but the renderer's rules drop none."""
        self.server = server
        self._reset_roles = forgotten_before(self.renderer, server.config.keep_reasoning)

    def serves(self, route: Route) -> bool:
        return True

    def open_session(self, spec: SessionSpec, on_sealed: Callable[[Session], None]) -> TokenSession:
        return TokenSession(spec, on_sealed, self)

    def open_forest(self, session: Session) -> tuple[Forest, LogFile | None]:
        """Return the forest of a new session, and the log that it writes, if any."""
        name, config = session.rollout_id, self.server.config
        side = config.auxiliary == "train"
        # Not the session's secret: the agent has that and could sign with it.
        key = secrets.token_bytes(32)
        if config.log_dir is None:
            return Forest(name, key, self._reset_roles, train_auxiliary=side), None
        log = LogFile.create(config.log_dir / f"{session.public_id}.log", name, train_auxiliary=side)
        return LoggedForest(name, key, log, self._reset_roles, train_auxiliary=side), log


class TokenSession(Session):
    """A session over an engine.

    A reply that the client did not get completely is kept and written again when the same body comes back; a
    call whose client has gone is finished by such a retry or cancelled after a short grace period; identical
    bodies sent in parallel get their own samples.
    """

    def __init__(
        self, spec: SessionSpec, on_sealed: Callable[[Session], None], backend: TokenBackend
    ) -> None:
        super().__init__(spec, on_sealed)
        self.server, self.engine, self.renderer = backend.server, backend.engine, backend.renderer
        self.forest, self.log = backend.open_forest(self)
        config = self.server.config
        self.bodies = BodyParser(config.max_json_depth, config.max_json_items)
        self.calls: list[TokenCall] = []
        """Running, or finished and not yet delivered."""
        self._counting = 0
        """Running token counts."""
        self._ordinal = 0
        self._max_busy = config.max_concurrent_calls + config.max_waiting_calls
        """Calls at the engine and waiting."""
        self._places = asyncio.Semaphore(config.max_concurrent_calls)
        self._reserved = 0
        """Tokens that running calls may sample."""
        self._freed = asyncio.Event()
        """Set when reserved tokens are free again."""
        self._refused = 0
        """Calls refused as too many since the last answered one."""
        self.wall = SessionClock(spec.limits.wall_s, self.stats)
        self.max_context = min(spec.limits.max_context_tokens, self.engine.info.max_context_tokens)
        # A longer text cannot be a prompt that fits the context.
        longest = max(MIN_BODY_LIMIT, BYTES_PER_CHAR * CHARS_PER_TOKEN * self.max_context)
        self._max_body_bytes = min(config.max_body_bytes, longest)
        self.checks = ReplyChecks(self.engine, self.renderer, spec.temperature)
        hook = self.server.config.hook
        self.hook = None if hook is None else hook.open(self.rollout_id, self.tools)
        self.own_ids: dict[str, str] = {}
        """Wire id -> the id that the model sampled, where its format has such ids."""
        self._unanswered: dict[int, int] = {}
        """Context node -> turn of its latest call that the engine failed and no later call repaired."""
        self._recoverable = False
        """`stats.infra_error` is a failure that an answered retry clears."""
        self._outages = 0
        """Failures since the last answered call."""
        self._outage_ends = 0
        """Calls before this turn were running when the engine last failed: theirs is the same failure."""

    @property
    def dead(self) -> str:
        failure, error = self.failure, self.stats.infra_error
        if failure is None and (self._recoverable or not error):
            return ""
        return error or type(failure).__name__

    @property
    def idle_overtime_s(self) -> float:
        return -1.0 if self._busy() else asyncio.get_running_loop().time() - self.wall.ends

    def _on_clock(self) -> None:
        self.wall.follow()

    # ----------------------------------------------------------------------- requests

    async def answer(self, http: web.BaseRequest, route: Route, dialect: Dialect) -> web.StreamResponse:
        config = self.server.config
        if route.kind == "models":
            return json_response(dialect.models(config.model_name))
        if route.kind == "model":
            return json_response(dialect.model(config.model_name))
        if route.kind == "count":
            body = await self._read(http, route, dialect)
            return json_response(dialect.count(await self.count_tokens(body.request)))
        try:
            body = await self._read(http, route, dialect)
            self.server.note("shim", not_offered(self.spec.shim, body.request.tools))
            if any(
                name == "context_management" and "compact" in value for name, value in body.request.advisory
            ):
                self.server.note("compaction", _NO_THRESHOLD)
            if hints := hints_of(http):
                body = replace(body, request=replace(body.request, hints=body.request.hints + hints))
            call = self.admit(body)
        except WireError as error:
            self.server.reports.refused(self.rollout_id, dialect.name, error.cause, self.dead)
            raise
        return await call.deliver(http, dialect, body)

    async def _read(self, http: web.BaseRequest, route: Route, dialect: Dialect) -> ParsedBody:
        query = f"?{http.query_string}" if http.query_string else ""
        with self.server.intake.share() as reserve:
            raw = await read_body(http, self.server.config, self._max_body_bytes, reserve)
            return await self.bodies.read(dialect, raw, route.action + query)

    def admit(self, body: ParsedBody) -> TokenCall:
        """Return a new call, or the one of the same body that lost its client. Raises WireError."""
        self.check_open()
        if self.dead:
            raise WireError("session_failed", "This session has failed and serves no more calls.")
        self.state = "live"
        left = self._left_behind(body)
        if left is not None:
            left.attach()
            return left
        if self._busy() >= self._max_busy:
            self.stats.refusals += 1
            self._refused += 1
            if self._refused < MAX_REFUSALS:
                raise _too_many()
        turn, self._ordinal = self._ordinal, self._ordinal + 1
        call = TokenCall(self, body, turn)
        self.calls.append(call)
        return call

    def _left_behind(self, body: ParsedBody) -> TokenCall | None:
        """Return a call of the same body whose client is gone."""
        canonical = b""
        for call in self.calls:
            if call.attached or call.task.cancelling():
                continue
            if call.digest != body.digest:
                canonical = canonical or canonical_digest(body)
            if call.digest == body.digest or call.canonical == canonical:
                return call
        return None

    def _busy(self) -> int:
        """Return the number of running calls, with or without clients."""
        return self._counting + sum(call.attached or not call.task.done() for call in self.calls)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the prompt tokens of a call with this request; changes nothing. Raises WireError."""
        self.check_open()
        if self._out_of():
            raise WireError("session_failed", "The budget of this session is used up.")
        if self._busy() >= self._max_busy:
            raise _too_many()
        self._counting += 1
        try:
            return await counted(self, request)
        except RenderError as error:
            raise unrenderable(error) from error
        finally:
            self._counting -= 1

    # ----------------------------------------------------------------------- budgets

    def _out_of(self) -> str:
        """Return the first budget that is used up; empty when there is none."""
        used_up = self.used_up(self.stats.calls) | {
            "nodes": len(self.forest) + 2 > self.spec.limits.max_nodes,
            "refusals": self._refused >= MAX_REFUSALS,
            "wall": self.wall.over,
        }
        return self.stats.budget_stop or next((name for name, out in used_up.items() if out), "")

    def spend(self, budget: str) -> None:
        """Record the first budget that ran out."""
        self.stats.budget_stop = self.stats.budget_stop or budget

    def spent(self) -> bool:
        """Return whether a budget is used up; record the first one."""
        if not self.tools.ended:
            self.spend(self._out_of())
        return self.tools.ended or bool(self.stats.budget_stop)

    def stop(self) -> Reply:
        """Return a reply that ends the agent's loop: plain text, no call, finish stop; never trained.

        Raises a WireError that no agent retries when the agent continues all the same.
        """
        self.stats.stops += 1
        if self.stats.stops > MAX_STOPS:
            raise WireError("session_failed", "The budget of this session is used up.")
        used_up = f"The budget of this session is used up ({self.stats.budget_stop})."
        stopped = f"{'The answer was accepted.' if self.tools.ended else used_up} Stopping here."
        return Reply(text=f"[insitu] {stopped}")

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place at the engine, first come, first served. Raises WireError after the deadline."""
        held = False
        try:
            async with QueueTimeout(self.wall, self.server.config.engine_deadline_s):
                held = await self._places.acquire()
        except TimeoutError:
            if not self.wall.over:
                raise _too_many() from None
        try:
            yield
        finally:
            if held:
                self._places.release()

    @asynccontextmanager
    async def reserved(self, request: ModelRequest, prompt: int) -> AsyncIterator[int]:
        """Reserve what a call with so many prompt tokens may sample; 0 when a budget ran out.

        Waits for tokens that parallel calls reserved. Raises WireError, also for a prompt that does not fit.
        """
        most = 0
        try:
            if await self._tokens_left():
                most = self._room(request, prompt)
                self._reserved += most
            yield most
        finally:
            self._reserved -= most
            self._freed.set()

    async def _tokens_left(self) -> bool:
        """Wait for tokens reserved by parallel calls; False when none are left. Raises WireError."""
        limit = self.spec.limits.max_session_tokens
        try:
            async with QueueTimeout(self.wall, self.server.config.engine_deadline_s):
                while self.stats.sampled_tokens + self._reserved >= limit:
                    if self.stats.sampled_tokens >= limit:
                        self.spend("tokens")
                        return False
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            if self.wall.over:
                return False
            raise _too_many() from None
        return True

    def _room(self, request: ModelRequest, prompt: int) -> int:
        """Return how many tokens this call may sample. Raises WireError on overflow."""
        if prompt >= self.max_context:
            raise overflow(prompt, self.max_context)
        most = self.spec.max_call_tokens
        requested = most if request.max_tokens is None else request.max_tokens
        left = self.spec.limits.max_session_tokens - self.stats.sampled_tokens - self._reserved
        return max(1, min(most, requested, self.max_context - prompt, left))

    # ----------------------------------------------------------------------- what ended calls mean

    def answered(self, node: int, turn: int) -> None:
        """Record a sampled reply to the prompt `node`: an agent that retried misses nothing."""
        self._refused = self._outages = 0
        if self._unanswered.get(node, turn) < turn:
            del self._unanswered[node]
        if self._recoverable and self.failure is None and not self._unanswered:
            self._recoverable, self.stats.infra_error = False, ""

    def engine_failed(self, error: EngineError, node: int, turn: int) -> None:
        """Record that the engine did not answer the prompt `node`."""
        self._unanswered[node] = turn
        stats = self.stats
        stats.engine_failures += 1
        if turn >= self._outage_ends:
            self._outages += 1
            self._outage_ends = self._ordinal
        again = isinstance(error, EngineUnavailable) and self._outages < MAX_OUTAGES
        self._recoverable = again and (self._recoverable or not stats.infra_error)
        stats.infra_error = stats.infra_error or str(error)

    def broken(self, error: BaseException) -> None:
        """Record a broken invariant or a defect; no more calls are answered."""
        if self.state != "sealed":
            self.failure = self.failure or error
            self.stats.infra_error = self.stats.infra_error or f"{type(error).__name__}: {error}"

    async def _drain(self, deadline_s: float) -> None:
        clock = asyncio.get_running_loop().time
        ends = clock() + deadline_s
        while (attached := [c for c in self.calls if c.attached]) and clock() < ends:
            try:
                async with asyncio.timeout(max(0.0, ends - clock())):
                    await attached[0].left.wait()
            except TimeoutError:
                break
        tasks = [call.task for call in self.calls if not call.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=max(1.0, deadline_s))
            if stuck and not self.stats.infra_error:
                # The sealed forest refuses the results of these calls.
                self.stats.infra_error = f"the engine did not stop {len(stuck)} cancelled calls"

    def _trajectory(self) -> Trajectory:
        return self.forest.trajectory()

    def _close(self) -> None:
        if isinstance(self.engine, TracksSessions):
            self.engine.release(self.rollout_id)
        super()._close()


def _too_many() -> WireError:
    return WireError("rate_limited", "Too many calls at a time in this session.")
