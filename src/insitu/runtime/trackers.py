"""Trackers of a run, whose followers are in insitu-view: asked for where `track.to` names one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from insitu import registry
from insitu.config import Config


def check_trackers(config: Config) -> None:
    """Raise ConfigError when a tracker cannot be opened in another process; import none."""
    for name in config.track.to:
        registry.check("trackers", name)
    if config.track.to:
        registry.find("parts", "check_trackers")(config)


def start_trackers(path: Path, config: Config, say: Callable[[str], None]) -> None:
    """Start a follower for each tracker of a run that has its directory; never wait and never raise.

    `say` gets one line where a follower fails. Followers end with the run.
    """
    if config.track.to:
        registry.find("parts", "start_trackers")(path, config, say)
