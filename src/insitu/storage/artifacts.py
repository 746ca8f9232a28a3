"""Agent artifacts: declared files collected from agents' sandboxes, stored under `artifacts/`.

    artifacts/<rollout id, "/" as "-">/<attempt>/<path inside the sandbox>

Number, size and secrets are handled where the files are collected. Write errors are ignored.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from insitu.types import Rollout

MAX_ROLLOUTS = 1000
"""Number of rollouts whose artifacts are kept, newest first."""


class AgentArtifacts:
    """Writer of the artifacts of a run's agents."""

    def __init__(self, folder: Path, *, max_rollouts: int = MAX_ROLLOUTS) -> None:
        self._folder, self._max_rollouts = folder, max_rollouts
        self._names = [path.name for path in sorted(folder.glob("*-*"), key=lambda p: p.stat().st_mtime_ns)]

    def keep(self, rollout: Rollout, artifacts: Mapping[str, bytes]) -> None:
        """Write the files of one attempt; `artifacts` maps the path inside the sandbox to its content."""
        name = rollout.id.replace("/", "-")
        if name not in self._names:
            self._names.append(name)
        folder = self._folder / name / str(rollout.attempt)
        for path, content in artifacts.items():
            parts = PurePosixPath(path).parts[1:]
            # The path comes from the sandbox and is not trusted: it must stay inside its folder.
            if path.startswith("/") and parts and ".." not in parts:
                with contextlib.suppress(OSError, ValueError):
                    _write(folder.joinpath(*parts), content)
        while len(self._names) > self._max_rollouts:
            shutil.rmtree(self._folder / self._names.pop(0), ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(content)
