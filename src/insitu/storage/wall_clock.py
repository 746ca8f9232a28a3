"""Wall time of a run over all its processes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from insitu.storage.store import Store

WALL_S = "wall_s"
"""Metadata key of a run."""


class WallClock:
    """Wall time of a run over all its processes.

    Stored with every committed step; a killed process loses the time since its last step.
    """

    def __init__(self, store: Store, began: float) -> None:
        self._earlier = float(store.meta().get(WALL_S, "0"))
        self._began = began

    def seconds(self) -> float:
        return self._earlier + time.monotonic() - self._began

    def meta(self) -> Mapping[str, str]:
        """Return it as metadata of the run."""
        return {WALL_S: f"{self.seconds():.3f}"}
