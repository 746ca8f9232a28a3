"""The wall time of a session. It stands still while one of its calls waits for an engine that is away.

`SessionClock` belongs to a session, `CallDeadline` to one call: a deadline that follows the clock.
`QueueTime` is the deadline of a call that waits for others, which may wait for the engine. Caller: turn.py.
"""

from __future__ import annotations

import asyncio
import math

from insitu.gateway.session_spec import AWAY_MOST_S, SessionStats


class SessionClock:
    """Starts when it is made."""

    def __init__(self, wall_s: float, stats: SessionStats) -> None:
        self._now = asyncio.get_running_loop().time
        self._ends = self._now() + wall_s
        self._stats = stats
        self._away = 0
        """Calls that wait now."""
        self.calls: set[CallDeadline] = set()

    @property
    def ends(self) -> float:
        """Reading of the loop's clock at which the wall time is over, as far as is known now."""
        if self._away:
            return self._ends + AWAY_MOST_S
        return self._ends + self._stats.away(self._now())

    @property
    def stands(self) -> bool:
        return self._away > 0

    @property
    def over(self) -> bool:
        return self._now() >= self._ends + self._stats.away(self._now())

    def on_wait(self) -> None:
        self._away += 1
        if self._away == 1:
            self._stats.away_since = self._now()
            self._follow()

    def on_resume(self) -> None:
        self._away -= 1
        if not self._away:
            self._stats.away_s, self._stats.away_since = self._stats.away(self._now()), None
            self._follow()

    def _follow(self) -> None:
        for call in self.calls:
            call.follow()


class CallDeadline:
    """One call: an `engines.downtime.Waiter`, and a context manager that raises TimeoutError at the wall's
    end or after `deadline_s` with the engine there."""

    def __init__(self, clock: SessionClock, deadline_s: float) -> None:
        self._clock, self._left_s = clock, deadline_s
        self._now = asyncio.get_running_loop().time
        self._runs_since: float | None = self._now()
        self._timer = asyncio.timeout_at(self._ends)
        self.cut = False
        """It was cancelled while it waited for an engine that was away."""

    @property
    def _ends(self) -> float:
        return min(self._own, self._clock.ends)

    @property
    def _own(self) -> float:
        return math.inf if self._runs_since is None else self._runs_since + self._left_s

    @property
    def expired(self) -> bool:
        """The timer has ended it, for either reason."""
        return self._timer.expired()

    @property
    def too_slow(self) -> bool:
        """The engine's deadline comes before the wall's end."""
        return self._own < self._clock.ends

    async def __aenter__(self) -> CallDeadline:
        await self._timer.__aenter__()
        self._clock.calls.add(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._clock.calls.discard(self)
        await self._timer.__aexit__(kind, error, trace)  # type: ignore[arg-type]

    def _stop(self) -> None:
        if self._runs_since is not None:
            self._left_s -= self._now() - self._runs_since
        self._runs_since = None

    def on_wait(self) -> None:
        self._stop()
        self._clock.on_wait()
        self.follow()

    def on_resume(self, *, cut: bool) -> None:
        self.cut |= cut
        self._runs_since = self._now()
        self._clock.on_resume()
        self.follow()

    def follow(self) -> None:
        """The clock has stopped, or goes on."""
        if self in self._clock.calls and not self._timer.expired():
            self._timer.reschedule(self._ends)


class QueueTime(CallDeadline):
    """One call that waits until another ends: its deadline stands still whenever the clock does."""

    async def __aenter__(self) -> QueueTime:
        await super().__aenter__()
        self.follow()
        return self

    def follow(self) -> None:
        if self._clock.stands:
            self._stop()
        elif self._runs_since is None:
            self._runs_since = self._now()
        super().follow()
