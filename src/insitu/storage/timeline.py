"""Timeline of a run, `timeline.jsonl`: gauges at intervals, and when phases of the loop began and ended.

Lines are those of `storage.metrics`: `event` is `gauges`, `begin`, `end` or `agent` (what one agent does).
Writing never raises: the first failure is logged and ends the timeline.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from insitu.errors import RecordError
from insitu.storage.metrics import Metrics, MetricsFile

log = logging.getLogger(__name__)
TIMELINE = "timeline.jsonl"


class Timeline:
    """Appends to the timeline of a run; holds no open file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def write(self, event: str, values: Metrics) -> None:
        """Append one line."""
        if self._failed:
            return
        try:
            with MetricsFile(self._path) as file:
                file.write({"event": event, **values})
        except RecordError as error:
            log.warning("the timeline ends error=%s", error)
            self._failed = True

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Write the begin and the end of a phase of the loop, such as collect, train, publish or evaluate."""
        place: Metrics = {"phase": name, "step": step}
        self.write("begin", place)
        try:
            yield
        finally:
            self.write("end", place)
