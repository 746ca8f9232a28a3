"""Sessions whose calls are sampled by an engine: every token is kept in the session's forest.

A reply that the client did not get completely is kept and written again when the same body comes back; a call
whose client has gone is finished by such a retry or cancelled after a short grace period; identical bodies
sent in parallel get their own samples.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from aiohttp import web

from insitu.capture.forest import Forest
from insitu.chat.renderer import ChatRenderer, forgotten_before
from insitu.engines.base import Engine, TracksSessions
from insitu.errors import EngineError, EngineUnavailable, RenderError
from insitu.gateway.backend import AgentRequest, ServerState
from insitu.gateway.body_cache import BodyCache, BodyName
from insitu.gateway.dialects.base import WireCall, WireError
from insitu.gateway.request import MemoryShare, hints_of, read_body
from insitu.gateway.response_writer import Delivery, json_response
from insitu.gateway.routes import Route
from insitu.gateway.session import Session
from insitu.gateway.text_tool_calls import not_offered
from insitu.gateway.turn import MAX_REFUSALS, Answer, Turns
from insitu.storage.session_log import LogFile, LoggedForest
from insitu.types import ModelRequest, Trajectory

MAX_OUTAGES = 4
"""Consecutive engine failures after which the session has failed for good; calls that were running at the
same time fail as one."""


_NO_THRESHOLD = (
    "an agent asks its provider to compact from a number of tokens on (context_management), which is recorded"
    " and not done: without another compaction its session ends at model.max_context_tokens"
)


class TokenBackend:
    """Opens sessions over one engine."""

    def __init__(self, engine: Engine, renderer: ChatRenderer) -> None:
        self._engine, self.renderer = engine, renderer
        self._server: ServerState
        self._reset_roles: frozenset[str]

    def connect(self, server: ServerState) -> None:
        """Raise ConfigError when reasoning is to be dropped but the renderer's rules drop none."""
        self._server = server
        self._reset_roles = forgotten_before(self.renderer, server.config.keep_reasoning)

    def serves(self, route: Route) -> bool:
        return True

    def open_calls(self, session: Session) -> TokenCalls:
        forest, log = self._open_forest(session)
        turns = Turns(self._engine, self.renderer, forest, session.spec, session.tools, session.stats)
        release = self._engine.release if isinstance(self._engine, TracksSessions) else None
        return TokenCalls(session, self._server, turns, forest, log, release)

    def _open_forest(self, session: Session) -> tuple[Forest, LogFile | None]:
        name, config = session.rollout_id, self._server.config
        side = config.auxiliary == "train"
        # Not the session's secret: the agent has that and could sign with it.
        key = secrets.token_bytes(32)
        if config.log_dir is None:
            return Forest(name, key, self._reset_roles, train_auxiliary=side), None
        log = LogFile.create(config.log_dir / f"{session.public_id}.log", name, train_auxiliary=side)
        return LoggedForest(name, key, log, self._reset_roles, train_auxiliary=side), log


@dataclass(slots=True, eq=False, kw_only=True)
class ModelCall:
    """One model call that is running, or finished and not yet delivered."""

    name: BodyName
    turn: int
    task: asyncio.Task[Answer]
    attached: bool = True
    """A client is waiting for it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the attached client has its reply or is gone."""
    grace: asyncio.TimerHandle | None = None


class TokenCalls:
    """The calls of one session."""

    def __init__(
        self,
        session: Session,
        server: ServerState,
        turns: Turns,
        forest: Forest,
        log: LogFile | None,
        release: Callable[[str], None] | None,
    ) -> None:
        self.session, self._server, self._turns, self._forest = session, server, turns, forest
        self._log, self._release = log, release
        config = server.config
        self.bodies = BodyCache(config.max_json_depth, config.max_json_items)
        self._calls: list[ModelCall] = []
        self._counting = 0
        """Running token counts."""
        self._ordinal = 0
        self._max_busy = config.max_concurrent_calls + config.max_waiting_calls
        """Calls at the engine and waiting."""
        self._recoverable = False
        """`stats.infra_error` is a failure that an answered retry clears."""
        self._outages = 0
        """Failures since the last answered call."""
        self._outage_ends = 0
        """Calls before this turn were running when the engine last failed: theirs is the same failure."""

    @property
    def dead(self) -> str:
        failure, error = self.session.failure, self.session.stats.infra_error
        if failure is None and (self._recoverable or not error):
            return ""
        return error or type(failure).__name__

    @property
    def idle_overtime_s(self) -> float:
        return -1.0 if self._busy() else self._turns.overtime_s

    # ----------------------------------------------------------------------- requests

    async def answer(self, request: AgentRequest) -> web.StreamResponse:
        kind, dialect = request.route.kind, request.dialect
        if kind == "models":
            return json_response(dialect.models(self._server.config.model_name))
        if kind == "model":
            return json_response(dialect.model(self._server.config.model_name))
        if kind == "count":
            wire, _ = await self._read(request)
            return json_response(dialect.count(await self.count_tokens(wire.request)))
        try:
            wire, name = await self._read(request)
            self._server.note("shim", not_offered(self.session.spec.shim, wire.request.tools))
            if any(
                name == "context_management" and "compact" in value for name, value in wire.request.advisory
            ):
                self._server.note("compaction", _NO_THRESHOLD)
            hints = hints_of(request.http)
            asked = replace(wire.request, hints=wire.request.hints + hints) if hints else wire.request
            call = self.admit(name, asked, wire.names)
        except WireError as error:
            self._server.reports.refused(self.session.rollout_id, dialect.name, error.cause, self.dead)
            raise
        delivery = Delivery(request=request, server=self._server, calls=self, call=call, wire=wire)
        failure = "client gone"
        try:
            response, failure = await delivery.run()
        except WireError as error:
            failure = error.cause
            raise
        finally:
            self._server.reports.report(delivery.report(failure))
        return response

    async def _read(self, request: AgentRequest) -> tuple[WireCall, BodyName]:
        http, config = request.http, self._server.config
        query = f"?{http.query_string}" if http.query_string else ""
        with MemoryShare(self._server.intake) as share:
            limit = min(config.max_body_bytes, self._turns.max_body_bytes)
            raw = await read_body(http, config, limit, share)
            return await self.bodies.read(request.dialect, raw, request.route.action + query)

    def admit(self, name: BodyName, request: ModelRequest, names: Mapping[str, str]) -> ModelCall:
        """Return a new call, or the one of the same body that lost its client. Raises WireError.

        `names`: `WireCall.names`.
        """
        session = self.session
        session.check_open()
        if self.dead:
            raise WireError("session_failed", "This session has failed and serves no more calls.")
        session.state = "live"
        for call in self._calls:
            if not call.attached and not call.task.cancelling() and call.name.same(name):
                self._attach(call)
                return call
        if self._busy() >= self._max_busy:
            session.stats.refusals += 1
            self._turns.refused += 1
            if self._turns.refused < MAX_REFUSALS:
                raise WireError("rate_limited", "Too many calls at a time in this session.")
        turn, self._ordinal = self._ordinal, self._ordinal + 1
        call = ModelCall(name=name, turn=turn, task=asyncio.create_task(self._run(request, names, turn)))
        call.task.add_done_callback(lambda _: self._settled(call))
        self._calls.append(call)
        return call

    def _busy(self) -> int:
        """Return the number of running calls, with or without clients."""
        return self._counting + sum(call.attached or not call.task.done() for call in self._calls)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the prompt tokens of a call with this request; changes nothing. Raises WireError."""
        self.session.check_open()
        if self._turns.out_of():
            raise WireError("session_failed", "The budget of this session is used up.")
        if self._busy() >= self._max_busy:
            raise WireError("rate_limited", "Too many calls at a time in this session.")
        self._counting += 1
        try:
            return await self._turns.count(request)
        except RenderError as error:
            raise _unrenderable(error) from error
        finally:
            self._counting -= 1

    def _attach(self, call: ModelCall) -> None:
        call.attached = True
        call.left = asyncio.Event()
        if call.grace is not None:
            call.grace.cancel()
        self.session.stats.replays += 1

    # ----------------------------------------------------------------------- turns

    async def _run(self, request: ModelRequest, names: Mapping[str, str], turn: int) -> Answer:
        """Run one turn; internal failures become errors that the agent may see."""
        stats = self.session.stats
        try:
            answer = await self._turns.run(request, turn, names)
        except RenderError as error:
            raise _unrenderable(error) from error
        except EngineError as error:
            self._engine_failed(error, turn)
            raise WireError("engine_failed", "The model server failed.") from error
        except asyncio.CancelledError:
            if turn in self._turns.cut_off:
                # Whether the agent or its timeout stopped it: it got no answer because the engine was down.
                self._engine_failed(EngineUnavailable("the engine was down when the call was stopped"), turn)
            raise
        if answer.node is not None:
            self._outages = 0
            if self._recoverable and self.session.failure is None and not self._turns.unanswered:
                # The agent retried and was answered: nothing is missing from what it saw.
                self._recoverable, stats.infra_error = False, ""
        return answer

    def _engine_failed(self, error: EngineError, turn: int) -> None:
        stats = self.session.stats
        stats.engine_failures += 1
        if turn >= self._outage_ends:
            self._outages += 1
            self._outage_ends = self._ordinal
        again = isinstance(error, EngineUnavailable) and self._outages < MAX_OUTAGES
        self._recoverable = again and (self._recoverable or not stats.infra_error)
        stats.infra_error = stats.infra_error or str(error)

    def _settled(self, call: ModelCall) -> None:
        """Keep what a call's end means for the session; every exception of a turn passes here."""
        session = self.session
        error = None if call.task.cancelled() else call.task.exception()
        if error is not None and not isinstance(error, WireError) and session.state != "sealed":
            session.failure = session.failure or error
            text = f"{type(error).__name__}: {error}"
            session.stats.infra_error = session.stats.infra_error or text
        if call.task.cancelled() or error is not None:
            self._forget(call)

    def delivered(self, call: ModelCall) -> None:
        """Record that the terminal event of this call's reply was written."""
        node = call.task.result().node
        if node is not None and self.session.state != "sealed":
            self._forest.mark_delivered(node)
        self._forget(call)
        call.left.set()

    def released(self, call: ModelCall) -> None:
        """Keep an undelivered reply, or give the call a short grace period: its client is gone."""
        call.attached = False
        call.left.set()
        if self.session.state == "sealed" or call not in self._calls:
            return
        call.name.canonical()  # the body itself is not kept for a retry that may never come
        if not call.task.done():
            grace_s = self._server.config.disconnect_grace_s
            call.grace = asyncio.get_running_loop().call_later(grace_s, call.task.cancel)
        elif not call.task.cancelled() and call.task.exception() is None:
            node = call.task.result().node
            if node is not None:
                self._forest.mark_aborted(node)

    def _forget(self, call: ModelCall) -> None:
        if call.grace is not None:
            call.grace.cancel()
        if call in self._calls:
            self._calls.remove(call)

    # ----------------------------------------------------------------------- the end

    async def drain(self, deadline_s: float) -> None:
        clock = asyncio.get_running_loop().time
        ends = clock() + deadline_s
        while (attached := [c for c in self._calls if c.attached]) and clock() < ends:
            try:
                async with asyncio.timeout(max(0.0, ends - clock())):
                    await attached[0].left.wait()
            except TimeoutError:
                break
        tasks = [call.task for call in self._calls if not call.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=max(1.0, deadline_s))
            if stuck and not self.session.stats.infra_error:
                # The sealed forest refuses the results of these calls.
                self.session.stats.infra_error = f"the engine did not stop {len(stuck)} cancelled calls"

    def trajectory(self) -> Trajectory:
        return self._forest.trajectory()

    def close(self) -> None:
        if self._release is not None:
            self._release(self.session.rollout_id)
        if self._log is not None:
            self._log.close()

    def drop_log(self) -> None:
        if self._log is not None:
            self._log.path.unlink(missing_ok=True)


def _unrenderable(error: RenderError) -> WireError:
    return WireError("invalid_request", f"The conversation cannot be rendered: {error}")
