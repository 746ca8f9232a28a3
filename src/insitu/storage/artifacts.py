"""artifacts/: files that were declared to be kept of agents' sandboxes.

    artifacts/<rollout id, "/" as "-">/<attempt>/<path inside the sandbox>

Their number and size were bounded, and secrets taken out, where they were collected. What cannot be written
is not worth a run: the failure is ignored.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from insitu.types import Rollout

MAX_ROLLOUTS = 1000
"""Rollouts whose artifacts are kept; of more, the newest."""


class AgentArtifacts:
    """Writes what the sandboxes of a run leave."""

    def __init__(self, folder: Path, *, most: int = MAX_ROLLOUTS) -> None:
        self._folder, self._most = folder, most
        self._names = [path.name for path in sorted(folder.glob("*-*"), key=lambda p: p.stat().st_mtime_ns)]

    def keep(self, rollout: Rollout, artifacts: Mapping[str, bytes]) -> None:
        """The files of one try, by inside path."""
        name = rollout.id.replace("/", "-")
        if name not in self._names:
            self._names.append(name)
        folder = self._folder / name / str(rollout.attempt)
        for path, content in artifacts.items():
            parts = PurePosixPath(path).parts[1:]
            # The path is the sandbox's word: it must not lead out of its folder here.
            if path.startswith("/") and parts and ".." not in parts:
                with contextlib.suppress(OSError, ValueError):
                    _write(folder.joinpath(*parts), content)
        while len(self._names) > self._most:
            shutil.rmtree(self._folder / self._names.pop(0), ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(content)
