"""Calls of host tools of a run's rollouts: one JSON line each in `host_calls.jsonl`, for the operator.

Tries that are not graded are there too, told apart by `attempt`. Callers: the trainer's loop, `whet rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from whet.errors import RecordError, boundary
from whet.types import Rollout


class HostCallLog:
    """Appends. One event loop owns it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, rollout: Rollout, calls: Sequence[Mapping[str, object]]) -> None:
        """The calls of one try in order. Raises RecordError."""
        place = {"rollout_id": rollout.id, "attempt": rollout.attempt}
        lines = b"".join(orjson.dumps({**place, **call}) + b"\n" for call in calls)
        with boundary(RecordError, f"cannot write {self._path}"), self._path.open("ab") as file:
            file.write(lines)
