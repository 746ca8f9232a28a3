"""Hosts that a run has lost, in a file that outlives the learner: one that is lost again and again waits.

After its first loss a host takes part again as soon as it comes; after each further one it waits, each time
twice as long. The others go on without it meanwhile. A run that is resumed begins with none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0


class LostHosts:
    """The losses so far, by name and address of the host."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        """Read them. path: their file; None = none is kept."""
        self._path, self._clock = path, clock
        self._losses: list[tuple[str, int, float]] = []
        if path is not None and path.exists():
            with suppress(ValueError, OSError):
                self._losses = [tuple(json.loads(line)) for line in path.read_text().splitlines()]

    def note(self, name: str, ranks: int) -> float:
        """Add a loss; return how long the host waits for it, in seconds."""
        self._losses.append((name, ranks, self._clock()))
        if self._path is not None:
            with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._losses[-1]) + "\n")
        return self.pause_s(name)

    def pause_s(self, name: str) -> float:
        """Return the seconds that a host still waits."""
        times = [when for host, _, when in self._losses if host == name]
        if len(times) < 2:
            return 0.0
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (len(times) - 2))
        return max(0.0, times[-1] + pause - self._clock())

    def paused_ranks(self) -> int:
        """Return the ranks of all hosts that wait."""
        ranks = {name: count for name, count, _ in self._losses}
        return sum(count for name, count in ranks.items() if self.pause_s(name))
