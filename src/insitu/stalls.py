"""A measure of how long this machine stood still, and deadlines that leave those seconds out.

A machine that swaps, is paused or stops its processes stalls this process and what runs beside it alike: what
was not done meanwhile is no failure of theirs. A stall is a tick of a thread that is over STALL_S late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Lock, Thread

TICK_S = 0.25
STALL_S = 1.0
AFTER_S = 1.0
"""Least time left after a stall: what was late wakes up late too."""


class _Ticker:
    """Counts stalls. Whoever reads first after a stall counts it, so no reader is early."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: Thread | None = None
        self._last = 0.0
        self._stalled = 0.0

    def stalled_s(self) -> float:
        with self._lock:
            now = time.monotonic()
            if self._thread is None or not self._thread.is_alive():  # also in a forked process
                self._last = now
                self._thread = Thread(target=self._tick, name="stall-clock", daemon=True)
                self._thread.start()
            if now - self._last > TICK_S + STALL_S:
                self._stalled += now - self._last - TICK_S
            self._last = now
            return self._stalled

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.stalled_s()


_ticker = _Ticker()


def stalled_s() -> float:
    """Return the seconds that this process stood still since its first call of this function."""
    return _ticker.stalled_s()


def awake_s() -> float:
    """Return monotonic seconds without stalls, for durations."""
    stalled = stalled_s()
    return time.monotonic() - stalled


@asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError after `seconds` without stalls, as asyncio.timeout does."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def check(ends: float, seen: float) -> None:
            stalled = stalled_s() - seen
            if stalled:
                ends = max(ends + stalled, loop.time() + min(AFTER_S, seconds))
            if loop.time() < ends:
                timers[0] = loop.call_at(ends, check, ends, seen + stalled)
            else:
                timeout.reschedule(loop.time())

        ends = loop.time() + seconds
        timers = [loop.call_at(ends, check, ends, stalled_s())]
        try:
            yield timeout
        finally:
            timers[0].cancel()
