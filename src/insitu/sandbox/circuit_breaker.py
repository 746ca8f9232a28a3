"""A circuit breaker.

    closed --threshold failures in the window--> open --cool-down over--> half open --success--> closed
                                                  ^--------- failure, cool-down doubled ---------|

A success resets the failures and the cool-down.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitOptions:
    """When a circuit opens, and for how long."""

    threshold: int = 5
    """Failures within the window that open the circuit."""
    window_s: float = 60.0
    cooldown_s: float = 30.0
    """First cool-down; doubled by each failed trial."""
    most_cooldown_s: float = 600.0


class Circuit:
    """Failure counter of one resource; not thread-safe."""

    def __init__(self, options: CircuitOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self._failed: deque[float] = deque()
        self._cooldown = options.cooldown_s
        self._until = 0.0
        self.state: State = "closed"
        self.cause = ""
        """Message of the last failure."""
        self.trips = 0
        """Times it opened, failed trials included."""

    @property
    def failures(self) -> int:
        """Failures in the window since the last success."""
        while self._failed and self._failed[0] <= self._clock() - self._options.window_s:
            self._failed.popleft()
        return len(self._failed)

    @property
    def cooled_in_s(self) -> float:
        """Seconds until a trial is due; 0 when it is due or the circuit is closed."""
        return max(0.0, self._until - self._clock()) if self.state == "open" else 0.0

    def try_again(self) -> bool:
        """Return whether the caller may make the one trial; True half-opens the circuit."""
        if self.state != "open" or self.cooled_in_s > 0:
            return False
        self.state = "half_open"
        return True

    def succeed(self) -> None:
        self._failed.clear()
        self._cooldown = self._options.cooldown_s
        self.state = "closed"

    def fail(self, cause: str) -> None:
        """Count a failure; while open it belongs to an earlier call and is ignored."""
        self.cause = cause
        if self.state == "open":
            return
        self._failed.append(self._clock())
        if self.state == "half_open":
            self._cooldown = min(2 * self._cooldown, self._options.most_cooldown_s)
        elif self.failures < self._options.threshold:
            return
        self.state = "open"
        self.trips += 1
        self._until = self._clock() + self._cooldown
