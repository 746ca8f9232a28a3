"""Log of host tool calls: one JSON line per call in `host_calls.jsonl`.

Includes failed and cancelled attempts, distinguished by `attempt`. Each line has `schema_version`. A torn
last line (kill, full disk) is cut off before the next write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from insitu.storage.metrics import MetricsFile

SCHEMA_VERSION = 1


class HostCallLog:
    """Append-only writer; not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, rollout_id: str, attempt: int, calls: Sequence[Mapping[str, object]]) -> None:
        """Append the calls of one attempt in order. Raises RecordError."""
        key = {"schema_version": SCHEMA_VERSION, "rollout_id": rollout_id, "attempt": attempt}
        with MetricsFile(self._path) as file:
            file.append(b"".join(orjson.dumps({**key, **call}) + b"\n" for call in calls))
