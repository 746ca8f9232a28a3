"""One request to a provider under way: what it was asked, how it went, what of the reply is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from insitu.gateway.dialects.base import WireError
from insitu.gateway.provider_session import ProviderSession
from insitu.gateway.provider_usage import Usage, unanswered, usage_of
from insitu.gateway.rate_limit import BUSY, asked_pause_s, back_off_s
from insitu.gateway.routes import Route

LAST_TRY_S = 0.25
"""Before the end of patience."""
KEPT_BYTES = 16 << 20
"""Of one reply, for the record; the agent gets all of it."""


@dataclass(slots=True, kw_only=True)
class ProviderCall:
    """One request under way."""

    session: ProviderSession
    turn: int
    route: Route
    request: bytes
    started: float = field(default_factory=time.monotonic)
    sent: int = 0
    """Times that the provider was asked."""
    held: bool = False
    """The provider has the request and has not refused it: it may bill what it reads."""
    status: int = 0
    trouble: str = ""
    """What kept the provider from answering."""
    begun: bool = False
    """The agent has a status line."""
    complete: bool = False
    dropped: int = 0
    """Bytes of the reply that are not kept."""
    reply: bytearray = field(default_factory=bytearray)

    @property
    def answered(self) -> bool:
        return self.complete and not (self.status in BUSY or self.status in (401, 402, 403))

    @property
    def path(self) -> str:
        return self.route.action

    def keep(self, chunk: bytes) -> None:
        """The end tells the usage and the beginning the prompt: what is too much falls out between them."""
        self.reply += chunk
        if len(self.reply) > KEPT_BYTES:
            end = len(self.reply) - KEPT_BYTES // 2
            self.dropped += end - KEPT_BYTES // 2
            del self.reply[KEPT_BYTES // 2 : end]

    def usage(self) -> Usage:
        """What the provider bills for it, as far as is known."""
        if self.route.kind == "call" and 200 <= self.status < 300:
            return usage_of(self.request, bytes(self.reply), dropped=self.dropped)
        if self.route.kind == "call" and self.held:
            return unanswered(self.request)
        return Usage(prompt_tokens=0, cached_tokens=0, sampled_tokens=0)


class ProviderBusy(Exception):
    """The provider would answer the same request later."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(pause_s)
        self.pause_s = pause_s


def raise_busy(headers: Mapping[str, str], sent: int, ends: float) -> None:
    """Raise Busy where there is patience left until `ends`. The last try is right before the end, unless the
    provider asks for a longer pause."""
    left_s = ends - time.monotonic() - LAST_TRY_S
    asked = asked_pause_s(headers)
    pause = min(left_s, back_off_s(sent)) if asked is None else asked
    if 0 <= pause <= left_s:
        raise ProviderBusy(pause)


def cut(call: ProviderCall, message: str) -> Exception:
    """A refusal, or a broken connection for an agent that already has half an answer."""
    return ConnectionResetError(message) if call.begun else WireError("engine_failed", message)
