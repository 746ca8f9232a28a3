"""When the next request may go to a provider: so many at a time, so many a minute, and none while it is busy.

What has to wait waits in order of asking, and only as long as the operator has patience; then the agent hears
that there is no room. A provider that says that it is busy holds back every session, not only the one that
was told. Caller: passthrough.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from insitu.gateway.dialects.base import WireError

MINUTE = 60.0
BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP statuses after which the same request may be answered later."""


class RateLimiter:
    """Over all sessions. One per provider."""

    def __init__(self, *, requests_per_minute: int, max_concurrent: int) -> None:
        self._per_minute, self._at_once = requests_per_minute, max_concurrent
        self._turnstile = asyncio.Lock()
        self._left = asyncio.Event()
        self._under_way = 0
        self._begun: deque[float] = deque()
        self._not_before = 0.0

    async def enter(self, ends: float) -> None:
        """Take a place; `leave` gives it back. `ends`: reading of time.monotonic() until which to wait.
        Raises WireError when there was no room until then."""
        if self._turnstile.locked() or self._closed_s():
            if time.monotonic() >= ends:
                raise self._no_room()
            await self._queue(ends)
        self._under_way += 1
        if self._per_minute:
            self._begun.append(time.monotonic())

    def leave(self) -> None:
        self._under_way -= 1
        self._left.set()

    def hold(self, seconds: float) -> None:
        """The provider is busy: let nothing through for so long."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def _queue(self, ends: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())), self._turnstile:
                while wait_s := self._closed_s():
                    self._left.clear()
                    try:
                        async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                            await self._left.wait()
                    except TimeoutError:
                        continue
        except TimeoutError:
            raise self._no_room() from None

    def _closed_s(self) -> float:
        """Seconds until there may be room; infinite when somebody has to leave first."""
        now = time.monotonic()
        while self._begun and self._begun[0] <= now - MINUTE:
            self._begun.popleft()
        if self._under_way >= self._at_once:
            return math.inf
        wait_s = self._not_before - now
        if self._per_minute and len(self._begun) >= self._per_minute:
            wait_s = max(wait_s, self._begun[-self._per_minute] + MINUTE - now)
        return max(0.0, wait_s)

    def _no_room(self) -> WireError:
        wait_s = self._closed_s()
        if math.isinf(wait_s):
            return WireError("rate_limited", "Too many requests at a time.")
        if self._not_before > time.monotonic():
            return WireError("rate_limited", f"The provider is busy. Try again in {math.ceil(wait_s)} s.")
        return WireError(
            "rate_limited", f"Too many requests per minute. Try again in {max(1, round(wait_s))} s."
        )
