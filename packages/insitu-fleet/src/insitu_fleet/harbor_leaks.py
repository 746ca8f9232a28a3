"""Sandboxes at a cloud that outlived their owner: found by a file for each on this machine, ended by name.

Harbor ends a sandbox of another process where the session's name is the provider's too (BY_NAME). Elsewhere
only its owner has its id: a line gives the name to look for at the provider, whose own time limit ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

import orjson

from insitu.errors import SandboxError
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.process_owner import is_dead, owner
from insitu_fleet.harbor_sdk import Factory, foreign

log = logging.getLogger(__name__)
STOP_S = 60.0
BY_NAME = frozenset({"docker", "podman", "gke"})
"""Kinds of Harbor; functions of the user must do it too."""


class Leaks:
    """The list of a machine's sandboxes of one kind of environment."""

    def __init__(self, folder: Path, kind: str, make: Factory) -> None:
        self._folder, self._kind, self._make = folder, kind, make

    def add(self, name: str, image: str) -> None:
        """Note a sandbox before it starts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        row = {"kind": self._kind, "image": image, "owner": owner()}
        (self._folder / name).write_bytes(orjson.dumps(row))

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    async def reap(self) -> int:
        """End what dead owners left; one that cannot be ended stays on the list. Return how many ended."""
        ended, by_name = 0, self._kind in BY_NAME or ":" in self._kind
        for path in sorted(self._folder.glob("insitu-*")):
            with contextlib.suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError):
                row = orjson.loads(path.read_bytes())
                if row["kind"] != self._kind or not is_dead(row["owner"]):
                    continue
                if by_name:
                    ended += await self._end(path.name, row["image"])
                else:
                    log.warning("perhaps left at the provider kind=%s session=%s", self._kind, path.name)
                    self.remove(path.name)
        return ended

    async def _end(self, name: str, image: str) -> int:
        folder = Path(tempfile.mkdtemp(prefix="insitu-harbor-"))
        try:
            with contextlib.suppress(SandboxError), foreign(SandboxError, "end a leaked sandbox"):
                environment = self._make(SandboxSpec(image=image, network="public", label=name), folder)
                async with asyncio.timeout(STOP_S):
                    await environment.stop(delete=True)
                self.remove(name)
                return 1
            return 0
        finally:
            shutil.rmtree(folder, ignore_errors=True)
