"""What the operator allows of a provider, and the life of one rollout before it: no tokens, only text.

Callers: passthrough, which makes the sessions; serve and collect, which open them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.errors import GatewayError
from insitu.gateway.dialects.base import WireError
from insitu.gateway.provider_usage import Prices, Usage
from insitu.gateway.routes import Route
from insitu.gateway.session import secret_digest
from insitu.gateway.session_spec import Rejections
from insitu.gateway.text_log import TextRecord
from insitu.types import Ledger, Trajectory

ASIDES_PER_CALL = 10
"""Requests that are no model calls (token counts, lists of models) beside each one that a session may make.
They cost nothing, but each has a line in its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamOptions:
    """The provider and the operator's limits, over all sessions."""

    url: str
    """Base URL up to the version, e.g. https://api.example.com: /v1/messages and the like are added."""
    model: str
    """The only one that is asked for: the prices are its own, and another's could pass any cost limit."""
    key: str = field(default="", repr=False)
    call_deadline_s: float = 600.0
    connect_deadline_s: float = 10.0
    requests_per_minute: int = 0
    """0 = no limit."""
    max_concurrent: int = 16
    max_wait_s: float = 0.0
    """Of one call: for its turn, and for a provider that is busy, which is asked again; 0 = none, the agent
    hears at once."""
    max_cost: float = 0.0
    """In the unit of the prices; 0 = no limit. Checked before a call, so calls under way may pass it."""
    prices: Prices = field(default_factory=Prices)


@dataclass(slots=True, kw_only=True)
class Spent:
    """What calls used so far; they only grow."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    estimated_calls: int = 0
    """Calls whose tokens the provider did not name."""
    cost: float = 0.0

    def add(self, usage: Usage, cost: float) -> None:
        self.calls += 1
        self.prompt_tokens += usage.prompt_tokens
        self.sampled_tokens += usage.sampled_tokens
        self.estimated_calls += usage.estimated
        self.cost += cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What one session may use; 0 = no limit. Tokens are checked before a call."""

    max_calls: int
    max_sampled_tokens: int = 0
    max_prompt_tokens: int = 0

    def spent_by(self, turns: int, spent: Spent) -> str:
        """The first budget that is used up, or empty."""
        if turns >= self.max_calls:
            return "calls"
        if self.max_sampled_tokens and spent.sampled_tokens >= self.max_sampled_tokens:
            return "tokens"
        if self.max_prompt_tokens and spent.prompt_tokens >= self.max_prompt_tokens:
            return "prompt_tokens"
        return ""


class ProviderSession:
    """Gateway-side life of one rollout without tokens. Made by `ProviderProxy.open_session`."""

    def __init__(
        self,
        rollout_id: str,
        record: TextRecord,
        budgets: Budgets,
        listener: Path | None,
        on_sealed: Callable[[ProviderSession], None],
    ) -> None:
        self._on_sealed = on_sealed
        self.rollout_id, self.record, self.budgets, self.listener = rollout_id, record, budgets, listener
        self.public_id = secrets.token_hex(8)
        self.secret = secrets.token_urlsafe(32)
        self.tool_secret = ""
        """There are no host tools: the body goes on as it is."""
        self.digest = secret_digest(self.secret)
        self.spent = Spent()
        self.turns = self.asides = 0
        """Model calls admitted, and other requests."""
        self.waited_s = 0.0
        """Seconds that calls spent waiting for their turn or for a busy provider."""
        self.budget_stop = ""
        """First budget that ran out: calls, tokens or prompt_tokens; empty when none did."""
        self.trouble = ""
        """Why the last call got no answer, where that is not the agent's fault; empty when it got one."""
        self.rejections = Rejections()
        self.under_way: set[asyncio.Task[Any]] = set()
        self.left = False
        """The agent said that it is done."""
        self.closed = False
        """Sealed, by the operator."""

    def check(self, route: Route) -> None:
        """Raises WireError when the budgets allow no further such request."""
        stop = self.budgets.spent_by(self.turns, self.spent)
        if stop:
            if route.kind == "call":
                self.budget_stop = self.budget_stop or stop
            what = "call" if stop == "calls" else "token"
            raise WireError("session_failed", f"The {what} limit of this session is reached. Stop here.")
        if route.kind != "call" and self.asides >= ASIDES_PER_CALL * self.budgets.max_calls:
            raise WireError("session_failed", "This session has asked for too many token counts. Stop here.")

    def admitted(self, route: Route) -> int:
        """Count one request; returns its ordinal."""
        ordinal = self.turns + self.asides
        if route.kind == "call":
            self.turns += 1
        else:
            self.asides += 1
        return ordinal

    async def seal(self, deadline_s: float) -> Trajectory:
        """Refuse new calls, let those under way end within `deadline_s`, cut the rest. Holds no token: the
        trajectory is empty, so nothing of it can be trained. Raises GatewayError when sealed before."""
        if self.closed:
            raise GatewayError(f"session of rollout {self.rollout_id} is already sealed")
        self.closed = True
        try:
            if self.under_way:
                _, late = await asyncio.wait(self.under_way, timeout=deadline_s)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late, timeout=max(1.0, deadline_s))
        finally:
            self._on_sealed(self)
        return Trajectory(segments=(), turns=(), ledger=Ledger())


def record_name(rollout_id: str) -> str:
    """The rollout's id as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", rollout_id).lstrip(".") or "session"
