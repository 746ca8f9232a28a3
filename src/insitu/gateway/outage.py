"""Whether a provider is there: lines for the person when it goes and comes back, and the end of patience.

Fed by every call of every session. Caller: passthrough; runtime/upstream.py ends a run by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from insitu.errors import EngineUnavailable

AWAY = frozenset({502, 503, 504})
"""HTTP statuses of a proxy before a provider that is not there."""
QUIET_S = 2.0
"""A shorter outage is nobody's business."""
LEAST_S = 30.0
"""No shorter outage ends a run, however short the patience of a call."""
GAP_S = 120.0
"""Failures further from each other are two outages: nobody asked meanwhile."""


class Outage:
    """One per provider."""

    def __init__(
        self,
        url: str,
        max_wait_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._max_wait_s, self._say, self._clock = url, max_wait_s, say, clock
        self._since: float | None = None
        self._last = 0.0
        self._why, self._told = "", False

    @property
    def lasted_s(self) -> float:
        """Seconds from the first failure to the last one; 0 when a call was answered since. The time in which
        nobody asks is no outage."""
        return 0.0 if self._since is None else self._last - self._since

    def failed(self, why: str) -> None:
        """The provider could not be reached, or a proxy answered in its place."""
        self._why = why
        gap_s, self._last = self._clock() - self._last, self._clock()
        if self._since is None or gap_s > GAP_S:
            self._since = self._last
        elif not self._told and self.lasted_s >= QUIET_S:
            self._told = True
            self._say(
                f"the provider at {self._url} does not answer: {why}; asking again for"
                f" {self._limit_s:g} s (engine.max_wait_s)"
            )

    def answered(self) -> None:
        if self._told and self._since is not None:
            self._say(f"the provider at {self._url} answers again, after {self._clock() - self._since:.0f} s")
        self._since, self._told = None, False

    @property
    def over(self) -> bool:
        """It has lasted longer than calls and runs wait."""
        return self.lasted_s >= self._limit_s

    def check(self) -> None:
        """Raises EngineUnavailable when it is over."""
        if self.over:
            raise EngineUnavailable(
                f"the provider at {self._url} has not answered for {self.lasted_s:.0f} s (engine.max_wait_s ="
                f" {self._max_wait_s:g}): {self._why}"
            )

    @property
    def _limit_s(self) -> float:
        return max(LEAST_S, self._max_wait_s)
