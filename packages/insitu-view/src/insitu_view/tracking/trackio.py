"""Trackio: a local SQLite database (`trackio show`), in TRACKIO_DIR where that is set."""

from __future__ import annotations

from collections.abc import Mapping

from insitu_view.tracking.base import TrackedRun, Tracker


class Trackio(Tracker):
    """Sends to a run whose name ends with the id of the run: trackio finds runs by name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        name = run.name if run.name == run.id else f"{run.name}-{run.id}"
        trackio.init(project=run.project, name=name, config=dict(run.config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        self._trackio.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, float], state: str) -> None:
        if summary:
            self._trackio.log({f"summary/{name}": value for name, value in summary.items()})
        self._trackio.finish()
