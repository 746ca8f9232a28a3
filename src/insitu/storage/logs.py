"""logs/: what agents said in rollouts that did not end well, and what insitu itself noted.

    logs/<rollout id, "/" as "-">.log   the agent's output of each failed or cut-off try
    logs/insitu.log                       insitu's own messages of level WARNING and above

Both are bounded in size, and nothing of them goes to the terminal, where a view may be drawn. Agent output
comes here redacted by its harness; insitu.log is redacted as it is written. A log that cannot be written is
not worth a run: the failure is ignored.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import re
from collections.abc import Iterator
from pathlib import Path

from insitu.types import Rollout

MAX_LOGS = 200
"""Rollouts whose logs are kept; of more, the newest."""
MAX_LOG_BYTES = 128 << 10
"""Of one rollout's log, all its tries together."""
MAX_INSITU_LOG_BYTES = 4 << 20

# As `secrets.token_urlsafe(32)` writes it.
_SECRET = re.compile(r"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")


class AgentLogs:
    """Writes the logs of a run's agents."""

    def __init__(self, folder: Path, *, most: int = MAX_LOGS) -> None:
        self._folder, self._most = folder, most
        self._names = [
            file.name for file in sorted(folder.glob("*-*.log"), key=lambda f: f.stat().st_mtime_ns)
        ]

    def keep(self, rollout: Rollout, log: bytes) -> None:
        """Append one try: how it ended, then the agent's redacted output."""
        name = rollout.id.replace("/", "-") + ".log"
        if name not in self._names:
            self._names.append(name)
        head = f"--- attempt {rollout.attempt}: {rollout.status.value} {rollout.error}".rstrip()
        with contextlib.suppress(OSError), (self._folder / name).open("ab") as file:
            room = MAX_LOG_BYTES - file.tell()
            file.write((head.encode("utf-8", "replace") + b"\n" + log)[: max(0, room - 1)] + b"\n"[:room])
        while len(self._names) > self._most:
            with contextlib.suppress(OSError):
                (self._folder / self._names.pop(0)).unlink()


class _File(logging.handlers.RotatingFileHandler):
    """Says nothing on stderr when the file cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        """The disk is full or the folder is gone; the run will say so by itself."""


class _Redacted(logging.Formatter):
    """Also tracebacks pass here, so that no secret of a session reaches the file."""

    def format(self, record: logging.LogRecord) -> str:
        return _SECRET.sub("***", super().format(record))


@contextlib.contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Every message of every library goes to `file` while the context lasts, none to stderr."""
    root = logging.getLogger()
    try:
        handler = _File(file, maxBytes=MAX_INSITU_LOG_BYTES, backupCount=1, encoding="utf-8", delay=True)
    except OSError:
        yield
        return
    handler.setFormatter(_Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
