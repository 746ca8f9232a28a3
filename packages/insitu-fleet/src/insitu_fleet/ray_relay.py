"""The Ray actor of a fleet: starts a node on its machine and passes bytes on.

Ray gets this class by value, so a machine without insitu, or with another one, fails with the node's own
line. It must import nothing of insitu.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TAKE_S = 1.0
"""Longest wait of one `take`."""
TAIL = 600
CHUNK = 4 << 20
"""Most bytes of one `take`: each costs milliseconds, and a rollout of 64k tokens has 0.8 MB."""


class NodeRelay:
    """A node's process, and the connection to it."""

    _writer: asyncio.StreamWriter | None = None

    async def open(self, arguments: list[str], deadline_s: float) -> str:
        """Start the process and connect; return an error line, or empty."""
        # the name by which insitu finds folders of dead processes
        self._folder = Path(tempfile.mkdtemp(prefix=f"insitu-{os.getpid()}-", dir="/tmp"))
        socket, self._log = self._folder / "socket", self._folder / "log"
        words = [sys.executable, "-P", *arguments, "--socket", str(socket)]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: ASYNC220
        self._arrived: dict[int, bytes] = {}
        self._next = 0
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            try:
                self._reader, self._writer = await asyncio.open_unix_connection(socket, limit=CHUNK)
                return ""
            except OSError:
                if self._process.poll() is not None:
                    return self._last_output()
                await asyncio.sleep(0.05)
        return "its process did not start listening"

    async def put(self, number: int, data: bytes) -> None:
        """Send to the node, in the order of the numbers: Ray does not keep that of calls."""
        self._arrived[number] = data
        while self._writer is not None and self._next in self._arrived:
            self._writer.write(self._arrived.pop(self._next))
            self._next += 1

    async def take(self) -> tuple[bytes, str]:
        """Return what has come from the node, or why nothing more will."""
        try:
            data = await asyncio.wait_for(self._reader.read(CHUNK), TAKE_S)
        except TimeoutError:
            return b"", ""
        except OSError:
            data = b""
        return data, "" if data else self._last_output()

    async def close(self, wait_s: float) -> None:
        """Close the connection and wait for the node's end, then kill it."""
        if self._writer is not None:  # it may not have started
            self._writer.close()
        ends = time.monotonic() + wait_s
        while self._process.poll() is None and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _last_output(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").strip().splitlines()
        words = " | ".join(line.strip() for line in lines[-6:])
        return f"its process died (exit status {self._process.poll()}){': ' + words if words else ''}"
