"""Options and counters of a session."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.gateway.dialects.base import WireError
from insitu.gateway.provider_usage import Spent
from insitu.gateway.text_tool_calls import TextShim
from insitu.types import Limits

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Options of one session."""

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
