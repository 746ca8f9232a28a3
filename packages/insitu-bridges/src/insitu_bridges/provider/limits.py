"""The provider of engine.kind = upstream, its rate limits and its outages.

Requests wait first come, first served, up to their deadline. A provider that reports being busy pauses all
sessions; an outage longer than the operator's wait ends the run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from pydantic import Field

from insitu.config.engines import ProviderKeys
from insitu.errors import EngineUnavailable
from insitu.gateway.dialects.base import WireError
from insitu_bridges.provider.usage import Prices


class ProviderOptions(ProviderKeys):
    """Provider and limits over all sessions.

    `url` ends before the path of a request (/v1/messages and the like). `max_cost` is checked before a call,
    so running calls may exceed it.
    """

    url: str = ""
    key: str = Field(default="", repr=False)
    call_deadline_s: float = 600.0
    connect_deadline_s: float = 10.0
    prices: Prices = Prices()


AWAY = frozenset({502, 503, 504})
"""HTTP statuses of a proxy in front of a provider that is down."""
QUIET_S = 2.0
"""Shorter outages are not reported."""
MIN_OUTAGE_S = 30.0
"""Shorter outages never end a run, however short the longest wait of a call is."""
GAP_S = 120.0
"""Failures further apart count as two outages: no call was made in between."""


class Outage:
    """One per provider."""

    def __init__(
        self,
        url: str,
        max_wait_s: float,
        log_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._max_wait_s, self._log_line, self._clock = url, max_wait_s, log_line, clock
        self._since: float | None = None
        self._last = 0.0
        self._cause, self._reported = "", False

    @property
    def lasted_s(self) -> float:
        """Seconds from the first failure to the last one; 0 when a call was answered since.

        Time without calls does not count.
        """
        return 0.0 if self._since is None else self._last - self._since

    def failed(self, cause: str) -> None:
        """Record that the provider could not be reached, or that a proxy answered in its place."""
        self._cause = cause
        gap_s, self._last = self._clock() - self._last, self._clock()
        if self._since is None or gap_s > GAP_S:
            self._since = self._last
        elif not self._reported and self.lasted_s >= QUIET_S:
            self._reported = True
            self._log_line(
                f"the provider at {self._url} does not answer: {cause}; asking again for"
                f" {self._limit_s:g} s (engine.max_wait_s)"
            )

    def answered(self) -> None:
        if self._reported and self._since is not None:
            self._log_line(
                f"the provider at {self._url} answers again, after {self._clock() - self._since:.0f} s"
            )
        self._since, self._reported = None, False

    @property
    def over(self) -> bool:
        """Whether it has lasted longer than calls and runs wait."""
        return self.lasted_s >= self._limit_s

    def check(self) -> None:
        """Raise EngineUnavailable when the outage has lasted too long."""
        if self.over:
            raise EngineUnavailable(
                f"the provider at {self._url} has not answered for {self.lasted_s:.0f} s (engine.max_wait_s ="
                f" {self._max_wait_s:g}): {self._cause}"
            )

    @property
    def _limit_s(self) -> float:
        return max(MIN_OUTAGE_S, self._max_wait_s)


MINUTE = 60.0
BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP statuses after which a retry may succeed."""


class RateLimiter:
    """One per provider, for all sessions."""

    def __init__(self, *, requests_per_minute: int, max_concurrent: int) -> None:
        self._per_minute, self._at_once = requests_per_minute, max_concurrent
        self._queue_lock = asyncio.Lock()
        self._left = asyncio.Event()
        self._running = 0
        self._started_at: deque[float] = deque()
        self._not_before = 0.0

    async def enter(self, ends: float) -> None:
        """Take a place; `leave` releases it.

        `ends`: reading of time.monotonic() until which to wait. Raises WireError when there was no place in
        time.
        """
        if self._queue_lock.locked() or self._wait_s():
            if time.monotonic() >= ends:
                raise self._rejection()
            await self._queue(ends)
        self._running += 1
        if self._per_minute:
            self._started_at.append(time.monotonic())

    def leave(self) -> None:
        self._running -= 1
        self._left.set()

    def hold(self, seconds: float) -> None:
        """Pause all requests for so long."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def _queue(self, ends: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())), self._queue_lock:
                while wait_s := self._wait_s():
                    self._left.clear()
                    try:
                        async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                            await self._left.wait()
                    except TimeoutError:
                        continue
        except TimeoutError:
            raise self._rejection() from None

    def _wait_s(self) -> float:
        """Return the seconds until there may be a place; infinite until another request leaves."""
        now = time.monotonic()
        while self._started_at and self._started_at[0] <= now - MINUTE:
            self._started_at.popleft()
        if self._running >= self._at_once:
            return math.inf
        wait_s = self._not_before - now
        if self._per_minute and len(self._started_at) >= self._per_minute:
            wait_s = max(wait_s, self._started_at[-self._per_minute] + MINUTE - now)
        return max(0.0, wait_s)

    def _rejection(self) -> WireError:
        wait_s = self._wait_s()
        if math.isinf(wait_s):
            return WireError("rate_limited", "Too many requests at a time.")
        if self._not_before > time.monotonic():
            return WireError("rate_limited", f"The provider is busy. Try again in {math.ceil(wait_s)} s.")
        return WireError(
            "rate_limited", f"Too many requests per minute. Try again in {max(1, round(wait_s))} s."
        )
