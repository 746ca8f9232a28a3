"""Outages of a provider: lines for the operator, and the end of waiting.

Fed by every call of every session; ends a run that waited too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from insitu.errors import EngineUnavailable

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
