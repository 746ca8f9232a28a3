"""Deadlines of a session and its calls, which are paused while the engine is down.

`SessionClock` is the wall time of a session, longer by the stalls of the machine, `CallDeadline` the timeout
of one call at the engine, and `QueueTimeout` the timeout of a call that waits for other calls.
"""

from __future__ import annotations

import asyncio
import math

from insitu.gateway.session import AWAY_MOST_S, SessionStats
from insitu.stalls import stalled_s


class SessionClock:
    """Wall time of a session; starts at once."""

    def __init__(self, wall_s: float, stats: SessionStats) -> None:
        self._now = asyncio.get_running_loop().time
        self._wall_ends = self._now() + wall_s - stalled_s()
        self._stats = stats
        self._away = 0
        """Number of calls that wait for the engine."""
        self.calls: set[CallDeadline] = set()

    @property
    def ends(self) -> float:
        """Loop time at which the wall time is over, by present knowledge."""
        if self._away or self._stats.graded_since is not None:
            return self._ends + AWAY_MOST_S
        return self._ends + self._stats.away(self._now())

    @property
    def _ends(self) -> float:
        return self._wall_ends + stalled_s() + self._stats.graded(self._now())

    @property
    def paused(self) -> bool:
        return self._away > 0

    @property
    def over(self) -> bool:
        return self._now() >= self._ends + self._stats.away(self._now())

    def on_wait(self) -> None:
        self._away += 1
        if self._away == 1:
            self._stats.away_since = self._now()
            self.follow()

    def on_resume(self) -> None:
        self._away -= 1
        if not self._away:
            self._stats.away_s, self._stats.away_since = self._stats.away(self._now()), None
            self.follow()

    def follow(self) -> None:
        """Let the calls follow a change of `ends`."""
        for call in self.calls:
            call.follow()


class CallDeadline:
    """Timeout of one call; an `engines.downtime.Waiter` and a context manager.

    Raises TimeoutError at the end of the wall time or after `deadline_s` without the engine's downtime.
    """

    def __init__(self, clock: SessionClock, deadline_s: float) -> None:
        self._clock, self._left_s = clock, deadline_s
        self._now = asyncio.get_running_loop().time
        self._runs_since: float | None = self._now()
        self._timer = asyncio.timeout_at(self._ends)
        self.cut = False
        """The call was cancelled while the engine was down."""

    @property
    def _ends(self) -> float:
        return min(self._own, self._clock.ends)

    @property
    def _own(self) -> float:
        return math.inf if self._runs_since is None else self._runs_since + self._left_s

    @property
    def expired(self) -> bool:
        """Whether the call was cut off, for either reason."""
        return self._timer.expired()

    @property
    def too_slow(self) -> bool:
        """Whether the engine's deadline comes before the end of the wall time."""
        return self._own < self._clock.ends

    async def __aenter__(self) -> CallDeadline:
        await self._timer.__aenter__()
        self._clock.calls.add(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._clock.calls.discard(self)
        await self._timer.__aexit__(kind, error, trace)  # type: ignore[arg-type]

    def _pause(self) -> None:
        if self._runs_since is not None:
            self._left_s -= self._now() - self._runs_since
        self._runs_since = None

    def on_wait(self) -> None:
        self._pause()
        self._clock.on_wait()
        self.follow()

    def on_resume(self, *, cut: bool) -> None:
        self.cut |= cut
        self._runs_since = self._now()
        self._clock.on_resume()
        self.follow()

    def follow(self) -> None:
        """Handle a pause or the end of a pause of the session's clock."""
        if self in self._clock.calls and not self._timer.expired():
            self._timer.reschedule(self._ends)


class QueueTimeout(CallDeadline):
    """Timeout of a call that waits for another one: it is paused whenever the session's clock is."""

    async def __aenter__(self) -> QueueTimeout:
        await super().__aenter__()
        self.follow()
        return self

    def follow(self) -> None:
        if self._clock.paused:
            self._pause()
        elif self._runs_since is None:
            self._runs_since = self._now()
        super().follow()
