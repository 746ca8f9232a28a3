"""Warn after 1, 10 and 30 seconds without groups for the trainer, and end a run that is stalled.

All warnings are logged, the last one is also shown to the user. The stall timeout counts from the last
progress, a rollout begun or decided: agents may take minutes, and a wait in which rollouts end is no fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from insitu.errors import TrainError

log = logging.getLogger(__name__)

MARKS_S = (1.0, 10.0, 30.0)


@dataclass(slots=True)
class Activity:
    """When a rollout last began or was decided; collectors that share workers share it."""

    at_s: float = 0.0


class Starvation:
    """One wait of the trainer, from `now` on; times are readings of the event loop's clock."""

    def __init__(
        self,
        now: float,
        limit_s: float,
        activity: Activity,
        warn: Callable[[str], None] = lambda line: None,
        marks: Sequence[float] = MARKS_S,
    ) -> None:
        self._began = activity.at_s = now
        self._activity = activity
        self._limit_s, self._warn = limit_s, warn
        self._marks = list(marks)

    @property
    def next_at(self) -> float:
        """When `look` is due if nothing happens before."""
        ends = self._activity.at_s + self._limit_s
        return min(ends, self._began + self._marks[0]) if self._marks else ends

    def allow(self, limit_s: float) -> None:
        """Raise the limit to at least `limit_s`: a running task may need that long."""
        self._limit_s = max(self._limit_s, limit_s)

    def look(self, now: float, cause: str) -> None:
        """Warn when a mark has passed; raise TrainError with the cause at the limit."""
        if (idle_s := now - self._activity.at_s) >= self._limit_s:
            raise TrainError(f"no rollout began and none was decided for {idle_s:.0f} s: {cause}")
        while self._marks and now >= self._began + self._marks[0]:
            mark = self._marks.pop(0)
            log.warning("starved waited_s=%g %s", mark, cause)
            if not self._marks:
                self._warn(f"the trainer has waited {mark:g} s for groups: {cause}")
