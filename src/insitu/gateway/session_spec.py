"""What a session was opened with, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.gateway.dialects.base import WireError
from insitu.gateway.provider_usage import Spent
from insitu.gateway.text_tool_calls import TextShim
from insitu.types import Limits

AWAY_MOST_S = 3600.0
"""Seconds that a session's wall time grows by at most."""
MESSAGE_CHARS = 200
"""Of a rejection's reason that are kept."""


@dataclass(slots=True)
class Rejections:
    """Requests of one session's agent that were answered with an error, those with a wrong key among them."""

    count: int = 0
    last: str = ""
    """Status and message of the last one that was a model call, or else of the first one."""

    def add(self, error: WireError, call: bool) -> None:
        """`call`: the request was for a model call."""
        self.count += 1
        if call or not self.last:
            self.last = f"HTTP {error.status}: {str(error)[:MESSAGE_CHARS]}"


@dataclass(slots=True, kw_only=True)
class SessionStats(Spent):
    """Counters of one session; they only grow. `calls` includes those that failed."""

    engine_s: float = 0.0
    waited_s: float = 0.0
    """Seconds that calls waited for a provider's rate limits."""
    away_s: float = 0.0
    """Seconds that calls waited for an engine of ours that was mended, got new weights, slept, or trained in
    the same process: the wall time is longer by as much."""
    away_since: float | None = None
    """Reading of the loop's clock since when one waits; None while none does."""
    engine_failures: int = 0
    """Calls that the engine left unanswered."""
    budget_stop: str = ""
    """First budget that ran out: calls, tokens, prompt_tokens, nodes, wall or refusals; empty when none
    did."""
    stops: int = 0
    """Synthetic replies given since."""
    refusals: int = 0
    """Calls turned away because too many were under way."""
    rejections: Rejections = field(default_factory=Rejections)
    truncated: bool = False
    """A reply was cut by a token limit, or a prompt did not fit."""
    overflows: int = 0
    malformed: int = 0
    injections: int = 0
    """Control markers found as plain text in messages from outside."""
    edited: int = 0
    """Requests that showed an assistant message other than what was sampled."""
    forks: int = 0
    """Requests that left the newest line: new root, rewind, rewritten context."""
    replays: int = 0
    """Replies written again after a delivery that failed."""
    aborted: int = 0
    """Calls given up because their client was gone."""
    shimmed: list[int] = field(default_factory=list)
    """Turns whose text was translated into a tool call on the wire."""
    infra_error: str = ""
    """First failure that makes the rollout unscorable."""

    def away(self, now: float) -> float:
        """`away_s` up to `now`, a reading of the loop's clock, bounded by `AWAY_MOST_S`."""
        going_on = 0.0 if self.away_since is None else now - self.away_since
        return min(AWAY_MOST_S, self.away_s + going_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a session was opened with."""

    rollout_id: str
    seed: int
    limits: Limits
    temperature: float
    max_call_tokens: int
    engine_deadline_s: float
    max_concurrent_calls: int = 16
    """Calls at the engine at a time; others wait."""
    inline_chars: int
    """Text longer than this is encoded in a worker thread."""
    shim: TextShim | None = None
    """Text -> tool call, for a model that cannot call tools."""
