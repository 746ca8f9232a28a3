"""Whose fault a call is that a provider did not answer: the provider's, or the session's own.

An agent can get a call refused: by a body that the provider cannot handle, or by a flood. So an unanswered
end is the provider's fault only where no request could be the cause, where the model never answered, or where
the agent asked again or another session met trouble too, and no other session was served meanwhile. That
another one was served says nothing of a rate limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from insitu.gateway.session import SessionStats

CALLS_AT_A_TIME = 8
"""Calls of one session at the provider, or waiting for it; further ones wait for these."""
NEAR_S = 10.0
"""Failures of two sessions at most this far apart are seen as the same one."""


@dataclass(slots=True)
class FaultLog:
    """What all sessions of a provider met."""

    troubles: deque[tuple[float, object]] = field(default_factory=lambda: deque(maxlen=4096))
    """Time and session of every attempt that the provider did not answer."""
    answers: deque[tuple[float, object]] = field(default_factory=lambda: deque(maxlen=4096))
    """Start and session of every answered call."""


@dataclass(frozen=True, slots=True)
class _Unanswered:
    began: float
    ended: float
    cause: str
    surely: bool
    load: bool


class SessionFaults:
    """The unanswered calls of one session, and its waits for the provider."""

    def __init__(self, log: FaultLog, stats: SessionStats) -> None:
        self._log, self._stats = log, stats
        self._places = asyncio.Semaphore(CALLS_AT_A_TIME)
        self._queued = self._waiting = 0
        self._counted_at: float | None = None
        """Until when the present wait is counted; None while none is."""
        self._unanswered: list[_Unanswered] = []
        """Those that began after the last answer came."""
        self._answered_at = -1.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the session's places; a wait for it is the session's own."""
        self._change(queued=1)
        try:
            await self._places.acquire()
        finally:
            self._change(queued=-1)
        try:
            yield
        finally:
            self._places.release()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count this time as a wait for the provider, once for all calls that wait at the same time.

        It is not counted while other calls of the session wait for a place.
        """
        self._change(waiting=1)
        try:
            yield
        finally:
            self._change(waiting=-1)

    def _change(self, *, queued: int = 0, waiting: int = 0) -> None:
        now = time.monotonic()
        if self._counted_at is not None:
            self._stats.waited_s += now - self._counted_at
        self._queued, self._waiting = self._queued + queued, self._waiting + waiting
        self._counted_at = now if self._waiting and not self._queued else None

    def met_trouble(self) -> None:
        """Note that the provider did not answer an attempt."""
        self._log.troubles.append((time.monotonic(), self))

    def ended(self, began: float, *, answered: bool, cause: str, surely: bool, load: bool) -> None:
        """Note the end of a call. `surely`: no request can be the cause; `load`: a rate limit is."""
        now = time.monotonic()
        if answered:
            self._log.answers.append((began, self))
            self._unanswered, self._answered_at = [], now
        elif cause and began > self._answered_at:
            self._unanswered.append(_Unanswered(began, now, cause, surely, load))

    def fault(self) -> str:
        """Return why the session failed by the provider's fault; empty if it did not, or nothing shows it."""
        if not self._unanswered:
            return ""
        calls = self._unanswered
        first, last = min(call.began for call in calls), max(call.ended for call in calls)
        surely = any(call.surely for call in calls) or self._answered_at < 0
        since, until = max(self._answered_at, first - NEAR_S), last + NEAR_S
        others = any(since <= when <= until for when, who in self._log.troubles if who is not self)
        again = any(call.began >= earlier.ended for call in calls for earlier in calls)
        served = any(began >= first for began, who in self._log.answers if who is not self)
        load = all(call.load for call in calls)
        shown = (others and (load or not served)) or (again and not served)
        return calls[-1].cause if surely or shown else ""
