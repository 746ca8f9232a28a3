"""What the sessions of a gateway share, whichever backend made them.

`token_backend` samples from an engine and keeps tokens; `insitu_bridges.provider` forwards to a provider and
keeps text. Listening, authorisation, host tools, admin API and reports are the same for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from insitu.gateway.request import GatewayConfig, GatewayCounters, MemoryBudget
from insitu.gateway.routes import Route
from insitu.gateway.session import Session, SessionSpec

INTERVAL_S = 1.0
MAX_KEYS = 64
"""Sessions and causes that are reported separately at a time; further ones are reported without a session."""
Key = tuple[str, str, str]
"""Rollout id, wire format, cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """One model call, or several refused ones: numbers and names, no text."""

    rollout_id: str
    """Empty for calls with a key that opens no session."""
    turn: int
    """-1 when the call was refused before it had one."""
    dialect: str
    outcome: str
    """Finish reason of the reply (stop, length), cause of a refusal or failure, `synthetic` for a budget
    stop, `client gone`; of a provider: its HTTP status."""
    drift: str = ""
    prompt_tokens: int = 0
    fresh_tokens: int = 0
    """Prompt tokens that were new since the turn it continues."""
    sampled_tokens: int = 0
    tool_calls: int = 0
    cost: float = 0.0
    """In the unit of the provider's prices."""
    ms: float = 0.0
    """From the request's arrival to the last byte of its reply."""
    count: int = 1
    """Number of refused calls in this report."""
    dead: str = ""
    """Permanent failure because of which the session answers no more calls; empty while it does."""


class CallReporter:
    """Passes reports to `on_call`; lives on the gateway's event loop."""

    def __init__(self, on_call: Callable[[CallReport], None]) -> None:
        self.report = on_call
        self._pending: dict[Key, int] = {}
        """Refusals since the last report of their key; a key is dropped after an interval without any."""
        self._dead: dict[Key, str] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def refused(self, rollout_id: str, dialect: str, cause: str, dead: str = "") -> None:
        """Count a call that was refused before it had a turn; the first of its key is reported at once."""
        key = rollout_id, dialect, cause
        if key not in self._pending and len(self._pending) >= MAX_KEYS:
            key = "", dialect, cause
        if key in self._pending:
            self._pending[key] += 1
            self._dead[key] = dead
        else:
            self._report(key, 1, dead)

    def close(self) -> None:
        """Report the pending refusals."""
        for timer in self._timers.values():
            timer.cancel()
        for key, count in self._pending.items():
            if count:
                self.report(_refusals(key, count, self._dead[key]))
        for table in (self._timers, self._pending, self._dead):
            table.clear()

    def _report(self, key: Key, count: int, dead: str) -> None:
        self._pending[key], self._dead[key] = 0, dead
        self._timers[key] = asyncio.get_running_loop().call_later(INTERVAL_S, self._due, key)
        self.report(_refusals(key, count, dead))

    def _due(self, key: Key) -> None:
        count, dead = self._pending.pop(key), self._dead.pop(key)
        del self._timers[key]
        if count:
            self._report(key, count, dead)


def _refusals(key: Key, count: int, dead: str) -> CallReport:
    rollout_id, dialect, cause = key
    return CallReport(rollout_id=rollout_id, turn=-1, dialect=dialect, outcome=cause, count=count, dead=dead)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What all sessions of a gateway share."""

    config: GatewayConfig
    counters: GatewayCounters
    intake: MemoryBudget
    """For bodies that no session has taken on yet."""
    reports: CallReporter
    log_line: Callable[[str], None]
    noted: set[str] = field(default_factory=set)
    """Subjects of `note` so far."""

    def note(self, subject: str, line: str) -> None:
        """Log a line, unless it is empty or one on this subject was logged before."""
        if line and subject not in self.noted:
            self.noted.add(subject)
            self.log_line(line)


class SessionBackend(Protocol):
    """Answers the calls of all sessions of one gateway."""

    def connect(self, server: ServerState) -> None:
        """Take the gateway's state; called once, before any session. Raises ConfigError."""

    def serves(self, route: Route) -> bool:
        """Return whether the route exists with this backend."""

    def open_session(self, spec: SessionSpec, on_sealed: Callable[[Session], None]) -> Session:
        """Raise ConfigError for options that this backend does not have."""
