"""Calls of host tools of a run's rollouts: one JSON line each in `host_calls.jsonl`, for the operator.

Tries that are not graded or were cancelled are there too, told apart by `attempt`; a line has
`schema_version`. A kill or a full disk can tear the last line: it is cut off before the next ones are
written. Callers: the trainer's loop, `insitu rollout`, `insitu serve`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from insitu.storage.metrics import cut_torn_line, disk_error

SCHEMA_VERSION = 1


class HostCallLog:
    """Appends. One event loop owns it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = False
        """The file ends with a whole line."""

    def keep(self, rollout_id: str, attempt: int, calls: Sequence[Mapping[str, object]]) -> None:
        """The calls of one try in order. Raises RecordError."""
        place = {"schema_version": SCHEMA_VERSION, "rollout_id": rollout_id, "attempt": attempt}
        lines = b"".join(orjson.dumps({**place, **call}) + b"\n" for call in calls)
        try:
            if not self._whole:
                cut_torn_line(self._path)
            self._whole = False
            with self._path.open("ab", buffering=0) as file:
                if file.write(lines) != len(lines):
                    raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            raise disk_error(self._path, error) from error
        self._whole = True
