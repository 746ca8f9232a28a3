"""Until when a try must be decided: its limit, longer by the time in which the engine was away.

`AttemptDeadline` is a context manager around the try. Its clock starts when the try has its worker, and asks
at the end of the limit, and of what the outages since have added, for more of them. Callers: dispatcher.py,
collector.py.
"""

from __future__ import annotations

import asyncio
import math

from insitu.agents.base import AwayTime, no_time

AGAIN_S = 1.0
"""Least time between two questions: while the engine is away each finds a little more."""


class AttemptDeadline:
    """Raises TimeoutError when the limit is over; without `start` there is none."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(None)
        self._asking: asyncio.TimerHandle | None = None
        self._away_s: AwayTime = no_time
        self._ends = math.inf

    async def __aenter__(self) -> AttemptDeadline:
        await self._timer.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self._timer.__aexit__(kind, error, trace)  # type: ignore[arg-type]

    def start(self, limit_s: float, away_s: AwayTime = no_time) -> None:
        """The try has `limit_s` from now on, infinite included, and `away_s` more, which may grow."""
        if math.isfinite(limit_s):
            self._ends, self._away_s = self._loop.time() + limit_s, away_s
            self._asking = self._loop.call_at(self._ends, self._ask)

    def expired(self) -> bool:
        """The try has been cut."""
        return self._timer.expired()

    def _ask(self) -> None:
        now, ends = self._loop.time(), self._ends + self._away_s()
        if now < ends:
            self._asking = self._loop.call_at(max(ends, now + AGAIN_S), self._ask)
        else:
            self._timer.reschedule(now)
