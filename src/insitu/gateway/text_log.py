"""Requests and replies of one black box session on disk, as text: no ids, no logprobs, never trainable.

One JSON object per line, appended when a call is over, whatever became of it. Bodies only: no header is
written, so no key is. Caller: passthrough.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import orjson

from insitu.errors import RecordError, boundary
from insitu.gateway.provider_usage import Spent, Usage
from insitu.gateway.routes import take_apart

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """One call that is over."""

    turn: int
    path: str
    status: int
    """HTTP status of the provider; 0 when it gave none."""
    complete: bool
    """The provider's answer was written to the agent to its end."""
    request: bytes
    reply: bytes
    truncated: bool
    """The reply was longer than what is kept of it."""
    usage: Usage
    cost: float
    ms: float


class TextRecord:
    """Appends to one file."""

    def __init__(self, path: Path, rollout_id: str) -> None:
        self.path = path
        self._rollout_id = rollout_id
        self._writing = asyncio.Lock()

    async def append(self, call: TextCall) -> None:
        """Raises RecordError when the disk does not take it."""
        async with self._writing:
            await asyncio.to_thread(self._write, call)

    def _write(self, call: TextCall) -> None:
        line = orjson.dumps(
            {
                "schema_version": SCHEMA,
                "rollout_id": self._rollout_id,
                **{k: v for k, v in _plain(call).items() if k not in ("request", "reply")},
                "request": _readable(call.request),
                "reply": _readable(call.reply),
            }
        )
        with boundary(RecordError, f"write {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", opener=_for_us_only) as file:
                file.write(line + b"\n")


def record_name(rollout_id: str) -> str:
    """Return the rollout id as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", rollout_id).lstrip(".") or "session"


def record_path(records: Path, rollout_id: str, *, numbered: bool) -> Path:
    """Return the file of a session; `numbered`: NAME.N.jsonl with the first unused number N."""
    name = record_name(rollout_id)
    if not numbered:
        return records / f"{name}.jsonl"
    return next(path for n in count(1) if not (path := records / f"{name}.{n}.jsonl").exists())


def last_record(records: Path, rollout_id: str) -> Path | None:
    """Return the record of a rollout's last attempt, the graded one; None without records."""
    name = record_name(rollout_id)
    attempts = [path for path in records.glob(f"{name}.*.jsonl") if path.suffixes[-2][1:].isdigit()]
    return max(attempts, key=lambda path: int(path.suffixes[-2][1:]), default=None)


def spent_in(records: Path) -> Spent:
    """Return the sum over all model calls of a run, failed attempts included; skip truncated lines.

    Raises RecordError.
    """
    spent = Spent()
    for file in sorted(records.glob("*.jsonl")):
        with boundary(RecordError, f"read {file}"), file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    continue
                entry = orjson.loads(line)
                route = take_apart(f"/v1/{entry['path']}")
                if route is not None and route.kind == "call":
                    spent.add(Usage(**entry["usage"]), entry["cost"])
    return spent


def _for_us_only(path: str, flags: int) -> int:
    """Prompts are in it: nobody else of the machine reads them."""
    return os.open(path, flags, 0o600)


def _plain(call: TextCall) -> Mapping[str, object]:
    return asdict(call)


def _readable(raw: bytes) -> object:
    """JSON where it is JSON, else text."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode("utf-8", "replace")
