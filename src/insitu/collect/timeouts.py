"""Deadline of an attempt, by a clock that is paused while the engine is down.

`AttemptDeadline` is a context manager around the attempt. It starts when the attempt has its worker.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from insitu.agents.base import Clock, loop_time
from insitu.capture.ledger import reassign
from insitu.types import Rollout

RECHECK_S = 1.0
"""Least seconds between two checks while the clock is paused."""


class AttemptDeadline:
    """Raises TimeoutError when the limit is over; without `start` there is no limit."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(None)
        self._check_timer: asyncio.TimerHandle | None = None
        self._clock: Clock = loop_time
        self._ends = math.inf

    async def __aenter__(self) -> AttemptDeadline:
        await self._timer.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        await self._timer.__aexit__(kind, error, trace)  # type: ignore[arg-type]

    def start(self, limit_s: float, clock: Clock = loop_time) -> None:
        """Start the limit: `limit_s` from now (may be infinite) by `clock`, which may be paused."""
        if math.isfinite(limit_s):
            self._ends, self._clock = clock() + limit_s, clock
            self._check_timer = self._loop.call_later(limit_s, self._check)

    def expired(self) -> bool:
        """Return whether the attempt was cut off."""
        return self._timer.expired()

    def _check(self) -> None:
        left_s = self._ends - self._clock()
        if left_s > 0:
            self._check_timer = self._loop.call_later(max(left_s, RECHECK_S), self._check)
        else:
            self._timer.reschedule(self._loop.time())


def timed_out(partial: Rollout, limit: float) -> Rollout:
    """Return a cancelled attempt as an infrastructure failure."""
    sampled = partial.trajectory
    return replace(
        partial,
        trajectory=replace(sampled, ledger=reassign(sampled.ledger, "infra")),
        error=f"timeout: the attempt did not finish within {limit:.0f} s",
    )
