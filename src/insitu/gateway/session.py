"""Gateway-side life of one rollout: open -> live -> draining -> sealed.

Holds the secret's digest, the budgets' counters and the calls in flight. A reply that the client did not
get whole is kept and written again when the same body comes back; a call whose client has gone is finished by
such a retry or cancelled after a short grace; twins sent on purpose get their own samples. Callers: server,
rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from insitu.capture.export import Form
from insitu.capture.forest import Forest
from insitu.capture.tree import TokenTree
from insitu.chat.renderer import ChatRenderer
from insitu.engines.base import Engine
from insitu.errors import EngineError, EngineUnavailable, GatewayError, RenderError
from insitu.gateway.body_cache import BodyCache, BodyName
from insitu.gateway.dialects.base import WireError
from insitu.gateway.host_tools import HostCall, ToolBox
from insitu.gateway.session_spec import SessionSpec, SessionStats
from insitu.gateway.turn import MAX_REFUSALS, Answer, Turns
from insitu.storage.session_log import LogFile, LoggedForest
from insitu.types import ModelRequest, Segment, Trajectory

MAX_OUTAGES = 4
"""Failures of the engine in a row before the session has failed for good; calls under way at the same time
fail as one."""
State = Literal["open", "live", "draining", "sealed"]


def secret_digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _unrenderable(error: RenderError) -> WireError:
    return WireError("invalid_request", f"The conversation cannot be rendered: {error}")


@dataclass(slots=True, eq=False, kw_only=True)
class ModelCall:
    """One model call under way, or finished and not yet delivered."""

    name: BodyName
    turn: int
    task: asyncio.Task[Answer]
    attached: bool = True
    """A client is waiting for it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the attached client has its reply or is gone."""
    grace: asyncio.TimerHandle | None = None


class Session:
    """Made by `Gateway.open_session`; lives on the gateway's event loop."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        spec: SessionSpec,
        *,
        listener: Path | None,
        max_waiting_calls: int,
        grace_s: float,
        on_sealed: Callable[[Session], None],
        bodies: BodyCache,
        tools: ToolBox | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.rollout_id, self.temperature, self.shim = spec.rollout_id, spec.temperature, spec.shim
        self.public_id = secrets.token_hex(8)
        self.secret = secrets.token_urlsafe(32)
        """For the agent; handed over by environment or file, never written by the gateway."""
        self.secret_digest = secret_digest(self.secret)
        self.tool_secret = secrets.token_urlsafe(32)
        """For the host tools' endpoint and the MCP server only."""
        self.tool_digest = secret_digest(self.tool_secret)
        self.tools = tools or ToolBox()
        self.listener = listener
        self.state: State = "open"
        self.left = False
        """The agent said that it is done."""
        self.failure: BaseException | None = None
        """What `seal` will raise: a broken invariant or a defect. Engine failures: `stats.infra_error`."""
        self._recoverable = False
        """`stats.infra_error` names a failure that an answered retry makes good."""
        self._outages = 0
        """Failures since the last answered call."""
        self._outage_ends = 0
        """Calls before this turn were under way when the engine last failed: theirs is the same failure."""
        # A key of its own: the agent knows the session's secret and could sign with it.
        key = secrets.token_bytes(32)
        side = spec.train_auxiliary
        self._log: LogFile | None = None
        self._forest = Forest(spec.rollout_id, key, spec.asking, train_auxiliary=side)
        if log_dir is not None:
            path = log_dir / f"{self.public_id}.log"
            self._log = LogFile.create(path, spec.rollout_id, train_auxiliary=side)
            self._forest = LoggedForest(spec.rollout_id, key, self._log, spec.asking, train_auxiliary=side)
        self.bodies = bodies
        self._turns = Turns(engine, renderer, self._forest, spec, self.tools)
        self._calls: list[ModelCall] = []
        self._counting = 0
        """Token counts under way."""
        self._ordinal = 0
        self._most = spec.max_concurrent_calls + max_waiting_calls
        """Calls at the engine and waiting."""
        self._grace_s = grace_s
        self._on_sealed = on_sealed

    @property
    def stats(self) -> SessionStats:
        return self._turns.stats

    @property
    def max_body_bytes(self) -> int:
        """Longer bodies cannot be a prompt that fits the context."""
        return self._turns.max_body_bytes

    @property
    def dead(self) -> str:
        """Why it serves no more calls: what failed for good; empty while it serves."""
        if self.failure is None and (self._recoverable or not self.stats.infra_error):
            return ""
        return self.stats.infra_error or type(self.failure).__name__

    @property
    def idle_overtime_s(self) -> float:
        """Seconds since the wall time was over; negative before, and while a call is under way."""
        return -1.0 if self._busy() else self._turns.overtime_s

    @property
    def host_calls(self) -> Sequence[HostCall]:
        """Calls of host tools so far, in order."""
        return self.tools.calls

    def owns(self, secret: str, listener: Path | None, scope: str = "agent") -> bool:
        """True when `secret` is this session's for `scope` and the request came in where it may: through its
        own socket, or through TCP (`listener` None), which only the operator opens and no sandbox can
        reach."""
        held = self.tool_digest if scope == "tool" else self.secret_digest
        known = hmac.compare_digest(held, secret_digest(secret))
        return known and (self.listener is None or listener is None or self.listener == listener)

    def admit(self, name: BodyName, request: ModelRequest) -> ModelCall:
        """A new call, or the one of the same body that lost its client. Raises WireError."""
        self._refuse_closed()
        if self.dead:
            raise WireError("session_failed", "This session has failed and serves no more calls.")
        self.state = "live"
        for call in self._calls:
            if not call.attached and not call.task.cancelling() and call.name.same(name):
                self._adopt(call)
                return call
        if self._busy() >= self._most:
            self.stats.refusals += 1
            self._turns.refused += 1
            if self._turns.refused < MAX_REFUSALS:
                raise WireError("rate_limited", "Too many calls at a time in this session.")
        turn, self._ordinal = self._ordinal, self._ordinal + 1
        call = ModelCall(name=name, turn=turn, task=asyncio.create_task(self._run(request, turn)))
        call.task.add_done_callback(lambda _: self._settled(call))
        self._calls.append(call)
        return call

    def _busy(self) -> int:
        """Calls under way, whether or not their clients are still there."""
        return self._counting + sum(call.attached or not call.task.done() for call in self._calls)

    def _refuse_closed(self) -> None:
        if self.left or self.state not in ("open", "live"):
            raise WireError("session_closed", "This session is closed.")

    def leave(self) -> None:
        """The agent says that it is done: further calls get a closed answer, those in flight end. Idempotent;
        only the operator seals."""
        self.left = True

    async def count_tokens(self, request: ModelRequest) -> int:
        """Prompt tokens a call with this request would have; changes nothing. Raises WireError."""
        self._refuse_closed()
        if self._turns.out_of():
            raise WireError("session_failed", "The budget of this session is used up.")
        if self._busy() >= self._most:
            raise WireError("rate_limited", "Too many calls at a time in this session.")
        self._counting += 1
        try:
            return await self._turns.count(request)
        except RenderError as error:
            raise _unrenderable(error) from error
        finally:
            self._counting -= 1

    def _adopt(self, call: ModelCall) -> None:
        call.attached = True
        call.left = asyncio.Event()
        if call.grace is not None:
            call.grace.cancel()
        self.stats.replays += 1

    async def _run(self, request: ModelRequest, turn: int) -> Answer:
        """One turn; failures of ours become what the agent may see of them."""
        try:
            answer = await self._turns.run(request, turn)
        except RenderError as error:
            raise _unrenderable(error) from error
        except EngineError as error:
            self._engine_failed(error, turn)
            raise WireError("engine_failed", "The model server failed.") from error
        except asyncio.CancelledError:
            if turn in self._turns.cut_off:
                # Whoever stopped it, the agent or its time: it had no answer because there was no engine.
                self._engine_failed(EngineUnavailable("the engine was away when the call was stopped"), turn)
            raise
        if answer.node is not None:
            self._outages = 0
            if self._recoverable and self.failure is None and not self._turns.unanswered:
                # The agent asked again and was answered: nothing is missing from what it saw.
                self._recoverable, self.stats.infra_error = False, ""
        return answer

    def _engine_failed(self, error: EngineError, turn: int) -> None:
        self.stats.engine_failures += 1
        if turn >= self._outage_ends:
            self._outages += 1
            self._outage_ends = self._ordinal
        again = isinstance(error, EngineUnavailable) and self._outages < MAX_OUTAGES
        self._recoverable = again and (self._recoverable or not self.stats.infra_error)
        self.stats.infra_error = self.stats.infra_error or str(error)

    def _settled(self, call: ModelCall) -> None:
        """Keep what a call's end means for the session; every exception of a turn passes here."""
        error = None if call.task.cancelled() else call.task.exception()
        late = self.state == "sealed"
        if error is not None and not isinstance(error, WireError) and not late:
            self.failure = self.failure or error
            self.stats.infra_error = self.stats.infra_error or f"{type(error).__name__}: {error}"
        if call.task.cancelled() or error is not None:
            self._forget(call)

    def delivered(self, call: ModelCall) -> None:
        """The terminal event of this call's reply was written."""
        node = call.task.result().node
        if node is not None and self.state != "sealed":
            self._forest.mark_delivered(node)
        self._forget(call)
        call.left.set()

    def released(self, call: ModelCall) -> None:
        """The client is gone before its reply was whole: keep the reply, or give the call a short grace."""
        call.attached = False
        call.left.set()
        if self.state == "sealed" or call not in self._calls:
            return
        call.name.canonical()  # the body itself is not kept for a retry that may never come
        if not call.task.done():
            call.grace = asyncio.get_running_loop().call_later(self._grace_s, call.task.cancel)
        elif not call.task.cancelled() and call.task.exception() is None:
            node = call.task.result().node
            if node is not None:
                self._forest.mark_aborted(node)

    def _forget(self, call: ModelCall) -> None:
        if call.grace is not None:
            call.grace.cancel()
        if call in self._calls:
            self._calls.remove(call)

    async def seal(self, deadline_s: float) -> Trajectory:
        """Refuse new calls, let attached ones end within `deadline_s`, abort the rest, export the forest.

        Raises what broke the session (CaptureError and defects), GatewayError when it was sealed before.
        """
        if self.state in ("draining", "sealed"):
            raise GatewayError(f"session of rollout {self.rollout_id} is already {self.state}")
        self.state = "draining"
        try:
            await self._drain(deadline_s)
        finally:
            self._end()
        if self.failure is not None:
            raise self.failure
        return self._forest.trajectory()

    def _end(self) -> None:
        self.state = "sealed"
        self._on_sealed(self)
        if self._log is not None:
            self._log.close()

    def drop_log(self) -> None:
        """The session is kept elsewhere, or nobody wants it."""
        if self._log is not None:
            self._log.path.unlink(missing_ok=True)

    def exported(self, form: Form) -> tuple[Segment, ...] | TokenTree:
        """The sealed session in one of the forest's shapes. Raises GatewayError before it is sealed."""
        if self.state != "sealed":
            raise GatewayError(f"session of rollout {self.rollout_id} is not sealed")
        return self._forest.export(form)

    async def abandon(self) -> None:
        """Abort everything without an export: the gateway is closing."""
        if self.state != "sealed":
            self.state = "draining"
            await self._drain(0.0)
            self._end()

    async def _drain(self, deadline_s: float) -> None:
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
            if stuck and not self.stats.infra_error:
                # What they still bring is refused by the sealed forest.
                self.stats.infra_error = f"the engine did not give up {len(stuck)} cancelled calls"
