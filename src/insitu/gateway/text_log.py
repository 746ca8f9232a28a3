"""Log of a provider's sessions as text, one file each: no ids, no logprobs, never trainable.

One JSON object per line, appended when a call is over. Only bodies are written, no headers, so no keys.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import orjson

from insitu.errors import RecordError, boundary
from insitu.gateway.routes import parse_path

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int
    """All tokens of the prompt, including cached ones."""
    cached_tokens: int
    """Prompt tokens read from the provider's cache."""
    written_tokens: int = 0
    """Prompt tokens written to the provider's cache."""
    sampled_tokens: int
    estimated: bool = False
    """The provider did not report all of it."""


@dataclass(slots=True, kw_only=True)
class Spent:
    """Sums over calls; they only grow."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    estimated_calls: int = 0
    """Calls whose tokens the provider did not report."""
    cost: float = 0.0

    def add(self, usage: Usage, cost: float) -> None:
        self.calls += 1
        self.prompt_tokens += usage.prompt_tokens
        self.sampled_tokens += usage.sampled_tokens
        self.estimated_calls += usage.estimated
        self.cost += cost


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """One finished call."""

    turn: int
    path: str
    status: int
    """HTTP status of the provider; 0 without an answer."""
    complete: bool
    """The complete answer was written to the agent."""
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
        """Append one call. Raises RecordError when the file cannot be written."""
        async with self._writing:
            await asyncio.to_thread(self._write, call)

    def _write(self, call: TextCall) -> None:
        line = orjson.dumps(
            {
                "schema_version": SCHEMA,
                "rollout_id": self._rollout_id,
                **{k: v for k, v in asdict(call).items() if k not in ("request", "reply")},
                "request": _readable(call.request),
                "reply": _readable(call.reply),
            }
        )
        with boundary(RecordError, f"write {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", opener=_private) as file:
                file.write(line + b"\n")


def _record_name(rollout_id: str) -> str:
    """Return the rollout id as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", rollout_id).lstrip(".") or "session"


def record_path(records: Path, rollout_id: str) -> Path:
    """Return the file of a session, NAME.N.jsonl with the first unused number N."""
    name = _record_name(rollout_id)
    return next(path for n in count(1) if not (path := records / f"{name}.{n}.jsonl").exists())


def last_record(records: Path, rollout_id: str) -> Path | None:
    """Return the record of a rollout's last attempt, the graded one; None without records."""
    name = _record_name(rollout_id)
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
                route = parse_path(f"/v1/{entry['path']}")
                if route is not None and route.kind == "call":
                    spent.add(Usage(**entry["usage"]), entry["cost"])
    return spent


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: it contains prompts."""
    return os.open(path, flags, 0o600)


def _readable(raw: bytes) -> object:
    """Return JSON parsed, other data as text."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode("utf-8", "replace")
