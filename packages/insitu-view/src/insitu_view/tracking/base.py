"""What a tracker is: an object that the follower of a run sends its metrics to.

A tracker is named in `track.to` by a built-in name, an entry point of group `insitu.trackers` or a path. It
is a function or a class of a `TrackedRun` that returns a `Tracker`. It runs in a process of its own: the
run does not wait for it and does not fail with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    id: str
    """ULID, the same for a resumed run and for each replay."""
    name: str
    """Name of the run directory."""
    project: str
    """`track.project`."""
    folder: Path
    """Folder for files of trackers, in the run directory."""
    config: Mapping[str, Mapping[str, Any]]
    """Resolved configuration: table -> key -> value; secrets are replaced."""


class Tracker:
    """Base class of trackers; every method may raise, which ends the follower and nothing else."""

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Send the metrics of a step or an evaluation; names are those of `insitu_view.tracking.names`."""

    def rollouts(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table of rollouts of an evaluation: facts without prompts and changes."""

    def finish(self, summary: Mapping[str, float], state: str) -> None:
        """Send the numbers of summary.json and flush everything; `state` is `finished` or `stopped`.

        Called once at the end of each follower. A stopped run may go on later, in another follower.
        """
