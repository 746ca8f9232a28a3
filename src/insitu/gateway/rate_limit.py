"""Rate limits of a provider: requests at a time, requests per minute, and pauses while it is busy.

Requests wait first come, first served, up to their deadline. A provider that reports being busy pauses all
sessions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from insitu.gateway.dialects.base import WireError

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
