"""Log files of a run: agents' output of failed rollouts and insitu's own log.

    logs/<rollout id, "/" as "-">.log   the agent's output of each failed or truncated attempt
    logs/insitu.log                     insitu's own messages of level WARNING and above

Both are bounded in size and never printed to the terminal. Agent output is already redacted; insitu.log is
redacted when written. Write errors are ignored.
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
"""Number of rollouts whose logs are kept, newest first."""
MAX_LOG_BYTES = 128 << 10
"""Size limit of one rollout's log, all attempts together."""
MAX_INSITU_LOG_BYTES = 4 << 20

SECRET = re.compile(r"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
"""Format of `secrets.token_urlsafe(32)`, as session secrets have."""


class AgentLogs:
    """Writer of the logs of a run's agents."""

    def __init__(self, folder: Path, *, max_logs: int = MAX_LOGS) -> None:
        self._folder, self._max_logs = folder, max_logs
        self._names = [
            file.name for file in sorted(folder.glob("*-*.log"), key=lambda f: f.stat().st_mtime_ns)
        ]

    def keep(self, rollout: Rollout, log: bytes) -> None:
        """Append one attempt: a header with its status, then the agent's redacted output."""
        name = rollout.id.replace("/", "-") + ".log"
        if name not in self._names:
            self._names.append(name)
        head = f"--- attempt {rollout.attempt}: {rollout.status.value} {rollout.error}".rstrip()
        with contextlib.suppress(OSError), (self._folder / name).open("ab") as file:
            room = MAX_LOG_BYTES - file.tell()
            file.write((head.encode("utf-8", "replace") + b"\n" + log)[: max(0, room - 1)] + b"\n"[:room])
        while len(self._names) > self._max_logs:
            with contextlib.suppress(OSError):
                (self._folder / self._names.pop(0)).unlink()


class _QuietFileHandler(logging.handlers.RotatingFileHandler):
    """Rotating file handler that prints nothing to stderr on write errors."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk or a missing folder: the run reports those itself."""


class _RedactingFormatter(logging.Formatter):
    """Formatter that masks session secrets, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return SECRET.sub("***", super().format(record))


@contextlib.contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Send all log messages to `file`, and none to stderr, inside the context."""
    root = logging.getLogger()
    try:
        handler = _QuietFileHandler(
            file, maxBytes=MAX_INSITU_LOG_BYTES, backupCount=1, encoding="utf-8", delay=True
        )
    except OSError:
        yield
        return
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
