"""Gateway-side life of one agent's connection to one rollout: open -> live -> draining -> sealed.

A session holds identity, secrets, limits, counters and host tools. Its backend made it as a `TokenSession` or
a `ProviderSession`, which answer its calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiohttp import web

from insitu.errors import GatewayError
from insitu.gateway.dialects.base import Dialect, WireError
from insitu.gateway.host_tools import HostCall, ToolBox
from insitu.gateway.routes import Route
from insitu.gateway.text_log import Spent
from insitu.gateway.text_tool_calls import TextShim
from insitu.stalls import stalled_s
from insitu.storage.session_log import LogFile
from insitu.types import Limits, Trajectory

State = Literal["open", "live", "draining", "sealed"]

AWAY_MOST_S = 3600.0
"""Largest extension of a session's wall time by engine downtime, in seconds."""
MESSAGE_CHARS = 200
"""Characters kept of a rejection's reason."""


@dataclass(slots=True)
class Rejections:
    """Requests of a session's agent that were answered with an error, including those with a wrong key."""

    count: int = 0
    last: str = ""
    """Status and message of the last rejected model call, or else of the first request."""

    def add(self, error: WireError, call: bool) -> None:
        """Count one; `call`: it was a model call."""
        self.count += 1
        if call or not self.last:
            self.last = f"HTTP {error.status}: {str(error)[:MESSAGE_CHARS]}"


@dataclass(slots=True, kw_only=True)
class SessionStats(Spent):
    """Counters of one session; they only grow. `calls` includes those that failed."""

    engine_s: float = 0.0
    waited_s: float = 0.0
    """Seconds in which calls waited for a provider's rate limits, counted once."""
    away_s: float = 0.0
    """Seconds that calls waited while the engine was down: restarted, got new weights, slept or trained. The
    wall time is extended by them."""
    away_since: float | None = None
    """Loop time since which a call waits; None while none does."""
    graded_s: float = 0.0
    """Seconds in which steps of the task were graded; the wall time is extended by them too."""
    graded_since: float | None = None
    """Loop time since which a step is graded; None while none is."""
    engine_failures: int = 0
    """Calls that failed at the engine."""
    budget_stop: str = ""
    """First budget that ran out: calls, tokens, prompt_tokens, nodes, wall or refusals; empty when none
    did."""
    stops: int = 0
    """Number of synthetic replies."""
    refusals: int = 0
    """Calls refused because too many were running."""
    rejections: Rejections = field(default_factory=Rejections)
    truncated: bool = False
    """A reply was cut by a token limit, or a prompt did not fit."""
    overflows: int = 0
    malformed: int = 0
    """Replies with a call that did not parse."""
    unknown_tools: int = 0
    """Replies with a call of a tool that the request did not offer; it is delivered as any."""
    left_out: int = 0
    """Lines in the place of images, sound and files in new texts: the model reads only text."""
    doing: str = field(default="", repr=False)
    """Begin of the newest reply for a view: its first call, else its text."""
    injections: int = 0
    """Control markers in the text of messages from outside."""
    edited: int = 0
    """Requests with an assistant message other than the sampled one."""
    forks: int = 0
    """Requests that branched off the newest line: new root, rewind, rewritten context."""
    replays: int = 0
    """Replies sent again after a failed delivery."""
    aborted: int = 0
    """Calls cancelled because their client was gone."""
    shimmed: list[int] = field(default_factory=list)
    """Turns whose text was translated into a tool call."""
    infra_error: str = ""
    """First failure that makes the rollout unscorable."""

    def away(self, now: float) -> float:
        """Return `away_s` at the loop time `now`, bounded by `AWAY_MOST_S`."""
        going_on = 0.0 if self.away_since is None else now - self.away_since
        return min(AWAY_MOST_S, self.away_s + going_on)

    def graded(self, now: float) -> float:
        """Return `graded_s` at the loop time `now`."""
        return self.graded_s + (0.0 if self.graded_since is None else now - self.graded_since)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Options of one session."""

    rollout_id: str
    seed: int
    limits: Limits
    temperature: float
    max_call_tokens: int
    tools: ToolBox
    listener: Path | None = None
    """Its own socket; None = TCP."""
    shim: TextShim | None = None
    """Text -> tool call, for a model that cannot call tools."""


def secret_digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class Session(ABC):
    """Made by `Gateway.open_session`; lives on the gateway's event loop."""

    def __init__(self, spec: SessionSpec, on_sealed: Callable[[Session], None]) -> None:
        self.spec = spec
        self.rollout_id, self.temperature = spec.rollout_id, spec.temperature
        self.tools, self.listener = spec.tools, spec.listener
        self.public_id = secrets.token_hex(8)
        self.secret = secrets.token_urlsafe(32)
        """For the agent; passed by environment or file, never written by the gateway."""
        self.secret_digest = secret_digest(self.secret)
        self.tool_secret = secrets.token_urlsafe(32)
        """For the host tools' endpoint and the MCP server only."""
        self.tool_digest = secret_digest(self.tool_secret)
        self.state: State = "open"
        self.task = ""
        """Task that the operator opened it for; sessions of one task form a group."""
        self.reward: float | None = None
        """Set by the operator before it is sealed; None = not graded."""
        self.left = False
        """The agent reported that it is done."""
        self.step = 1
        """Step of its task, counted from 1."""
        self.failure: BaseException | None = None
        """What `seal` will raise: a broken invariant or a defect. Engine failures: `stats.infra_error`."""
        self.stats = SessionStats()
        self.log: LogFile | None = None
        """What serves only to recover it after a kill; None = there is none."""
        self._stalled = stalled_s()
        self._on_sealed = on_sealed

    @property
    def dead(self) -> str:
        """Permanent failure because of which no more calls are answered; empty while they are."""
        return ""

    @property
    def idle_overtime_s(self) -> float:
        """Seconds since the wall time was over; negative before, and while a call is running."""
        return -1.0

    @abstractmethod
    async def answer(self, http: web.BaseRequest, route: Route, dialect: Dialect) -> web.StreamResponse:
        """Serve a model call, a token count or model names, and report a call.

        Raises WireError, ConnectionResetError when the client is gone.
        """

    @abstractmethod
    async def _drain(self, deadline_s: float) -> None:
        """Let running calls finish within the deadline and abort the rest."""

    @abstractmethod
    def _trajectory(self) -> Trajectory: ...

    def _close(self) -> None:
        """Release resources; called once, after `_drain`."""
        if self.log is not None:
            self.log.close()

    def drop_log(self) -> None:
        """Delete the log."""
        if self.log is not None:
            self.log.path.unlink(missing_ok=True)

    def used_up(self, calls: int) -> dict[str, bool]:
        """Return whether each budget is used up that tokens and text have both; `calls` so far."""
        stats, limits = self.stats, self.spec.limits
        return {
            "calls": calls >= limits.max_calls,
            "tokens": stats.sampled_tokens >= limits.max_session_tokens,
            "prompt_tokens": 0 < limits.max_prompt_tokens <= stats.prompt_tokens,
        }

    @property
    def host_calls(self) -> Sequence[HostCall]:
        """Calls of host tools so far, in order."""
        return self.tools.calls

    def clock(self) -> float:
        """Return the loop time without waits for the engine, grades of steps, and stalls since it opened."""
        stalled = stalled_s() - self._stalled
        now = asyncio.get_running_loop().time()
        return now - self.stats.away(now) - self.stats.graded(now) - stalled

    @contextmanager
    def grading(self) -> Iterator[None]:
        """Stop the clock while a step of the task is graded; calls after it are of the next step."""
        now, stats = asyncio.get_running_loop().time, self.stats
        stats.graded_since = now()
        self._on_clock()
        try:
            yield
        finally:
            stats.graded_s, stats.graded_since = stats.graded(now()), None
            self.step += 1
            self._on_clock()

    def _on_clock(self) -> None:  # noqa: B027 - calls of a provider have no wall time
        """Let running calls follow the clock, which has stopped or goes on."""

    def owns(self, secret: str, listener: Path | None, scope: str = "agent") -> bool:
        """Return whether `secret` is this session's for `scope`, from a listener that may use it.

        That is the session's own socket, or TCP (`listener` None), which only the operator opens and no
        sandbox can reach.
        """
        held = self.tool_digest if scope == "tool" else self.secret_digest
        known = hmac.compare_digest(held, secret_digest(secret))
        return known and (self.listener is None or listener is None or self.listener == listener)

    @property
    def done(self) -> bool:
        """Whether the agent has no more to do: it said so, or a host tool that ends was called."""
        return self.left or self.tools.ended

    def check_open(self) -> None:
        """Raise WireError when no more calls are accepted."""
        if self.left or self.state not in ("open", "live"):
            raise WireError("session_closed", "This session is closed.")

    def leave(self) -> None:
        """Refuse further calls at the agent's request; running ones finish. Only the operator seals."""
        self.left = True

    async def seal(self, deadline_s: float) -> Trajectory:
        """Refuse new calls, let running ones finish within `deadline_s`, abort the rest, return the tokens.

        Raises what broke the session (CaptureError and defects), GatewayError when it was sealed before.
        """
        if self.state in ("draining", "sealed"):
            raise GatewayError(f"session of rollout {self.rollout_id} is already {self.state}")
        await self._end(deadline_s)
        if self.failure is not None:
            raise self.failure
        return self._trajectory()

    async def abandon(self) -> None:
        """Abort everything without an export: the gateway is closing."""
        if self.state != "sealed":
            await self._end(0.0)

    async def _end(self, deadline_s: float) -> None:
        self.state = "draining"
        try:
            await self._drain(deadline_s)
        finally:
            self.state = "sealed"
            self._on_sealed(self)
            self._close()
