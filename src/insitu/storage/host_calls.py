"""Log of host tool calls: one JSON line per call in `host_calls.jsonl`.

Includes failed and cancelled attempts, distinguished by `attempt`. Each line has `schema_version`. A torn
last line (kill, full disk) is cut off before the next write.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from insitu.storage.metrics import cut_torn_line, disk_error

SCHEMA_VERSION = 1


class HostCallLog:
    """Append-only writer; not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends_clean = False
        """The file is known to end with a complete line."""

    def keep(self, rollout_id: str, attempt: int, calls: Sequence[Mapping[str, object]]) -> None:
        """Append the calls of one attempt in order.

        Raises RecordError.
        """
        key = {"schema_version": SCHEMA_VERSION, "rollout_id": rollout_id, "attempt": attempt}
        lines = b"".join(orjson.dumps({**key, **call}) + b"\n" for call in calls)
        try:
            if not self._ends_clean:
                cut_torn_line(self._path)
            self._ends_clean = False
            with self._path.open("ab", buffering=0) as file:
                if file.write(lines) != len(lines):
                    raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            raise disk_error(self._path, error) from error
        self._ends_clean = True
