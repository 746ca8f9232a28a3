"""Deadline of an attempt: its limit plus the engine downtime.

`AttemptDeadline` is a context manager around the attempt. Its clock starts when the attempt has its worker.
When the limit is over, it is extended by the downtime that has accumulated since.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from insitu.agents.base import AwayTime, no_time
from insitu.capture.ledger import reassign
from insitu.types import Rollout

RECHECK_S = 1.0
"""Least seconds between two checks: while the engine is down each check finds a little more downtime."""


class AttemptDeadline:
    """Raises TimeoutError when the limit is over; without `start` there is no limit."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(None)
        self._check_timer: asyncio.TimerHandle | None = None
        self._away_s: AwayTime = no_time
        self._ends = math.inf

    async def __aenter__(self) -> AttemptDeadline:
        await self._timer.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        await self._timer.__aexit__(kind, error, trace)  # type: ignore[arg-type]

    def start(self, limit_s: float, away_s: AwayTime = no_time) -> None:
        """Start the clock: `limit_s` from now (may be infinite), extended by `away_s()`, which may grow."""
        if math.isfinite(limit_s):
            self._ends, self._away_s = self._loop.time() + limit_s, away_s
            self._check_timer = self._loop.call_at(self._ends, self._check)

    def expired(self) -> bool:
        """Return whether the attempt was cut off."""
        return self._timer.expired()

    def _check(self) -> None:
        now, ends = self._loop.time(), self._ends + self._away_s()
        if now < ends:
            self._check_timer = self._loop.call_at(max(ends, now + RECHECK_S), self._check)
        else:
            self._timer.reschedule(now)


def timed_out(partial: Rollout, limit: float) -> Rollout:
    """Return a cancelled attempt as an infrastructure failure."""
    sampled = partial.trajectory
    return replace(
        partial,
        trajectory=replace(sampled, ledger=reassign(sampled.ledger, "infra")),
        error=f"timeout: the attempt did not finish within {limit:.0f} s",
    )
