"""The two sides of a session: the gateway in front of it, and the backend that answers its calls.

`token_backend` samples from an engine and keeps tokens; `provider_backend` forwards to a provider and keeps
text. Listening, authorisation, host tools, admin API and reports are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from insitu.gateway.call_reports import CallReporter
from insitu.gateway.dialects.base import Dialect
from insitu.gateway.request import GatewayConfig, GatewayCounters, MemoryBudget
from insitu.gateway.routes import Route
from insitu.types import Trajectory

if TYPE_CHECKING:
    from insitu.gateway.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What all sessions of a gateway share."""

    config: GatewayConfig
    counters: GatewayCounters
    intake: MemoryBudget
    """For bodies that no session has taken on yet."""
    reports: CallReporter
    log_line: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """An authorised request for a model call, a token count or model names."""

    http: web.BaseRequest
    route: Route
    dialect: Dialect


class SessionCalls(Protocol):
    """The calls of one session at its backend."""

    @property
    def dead(self) -> str:
        """Permanent failure because of which no more calls are answered; empty while they are."""

    @property
    def idle_overtime_s(self) -> float:
        """Seconds since the wall time was over; negative before, and while a call is running."""

    async def answer(self, request: AgentRequest) -> web.StreamResponse:
        """Serve a request and report it. Raises WireError, ConnectionResetError when the client is gone."""

    async def drain(self, deadline_s: float) -> None:
        """Let running calls finish within the deadline and abort the rest."""

    def trajectory(self) -> Trajectory: ...

    def close(self) -> None:
        """Release resources; called once, after `drain`."""

    def drop_log(self) -> None:
        """Delete the log that serves only to recover the session after a kill."""


class SessionBackend(Protocol):
    """Answers the calls of all sessions of one gateway."""

    def connect(self, server: ServerState) -> None:
        """Take the gateway's state; called once, before any session. Raises ConfigError."""

    def serves(self, route: Route) -> bool:
        """Return whether the route exists with this backend."""

    def open_calls(self, session: Session) -> SessionCalls: ...
