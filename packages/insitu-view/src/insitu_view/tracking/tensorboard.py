"""TensorBoard event files in `trackers/tensorboard/`, written by tensorboardX; wall times are the run's."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from insitu_view.tracking.base import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes scalars; a resumed run adds another file to the same folder."""

    def __init__(self, run: TrackedRun) -> None:
        # It imports torch where that is installed, and needs it for tensors only: 190 MiB of this process.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(run.folder / "tensorboard"))
        self._last = 0

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time_s)
        self._last = step
        self._writer.flush()

    def finish(self, summary: Mapping[str, float], state: str) -> None:
        for name, value in summary.items():
            self._writer.add_scalar(f"summary/{name}", value, self._last)
        self._writer.close()
