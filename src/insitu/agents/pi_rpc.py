"""Pi's RPC protocol: JSON lines on the stdin and stdout of one `pi --mode rpc` process.

One command at a time. Every line is read, or Pi stalls on a full pipe; only those that decide something are
parsed. What stands on that pipe may be the work of the agent's own commands, so a line that is not what it
should be is a HarnessError and nothing else, an answer counts only with its command's secret number, and
whatever is odd makes the process unfit for another rollout.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import orjson

from insitu.agents.base import AwayTime, no_time
from insitu.errors import HarnessError
from insitu.sandbox.base import Process

COMMAND_S = 30.0
LOG_BYTES = 64 << 10
_QUIET = frozenset({b"message_update", b"tool_execution_update", b"agent_end", b"turn_end", b"message_start"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PiRun:
    """How one prompt ended: `error` is what Pi says of its last model call, empty when that went well."""

    error: str
    log: bytes
    """Event lines without the streamed parts, bounded."""


def _kind(line: bytes) -> bytes:
    """The event's type, found without parsing; every line Pi writes starts with it or with an id."""
    head = line[:96]
    start = head.find(b'"type":"')
    return head[start + 8 : head.find(b'"', start + 8)] if start >= 0 and head.startswith(b"{") else b""


def _parse(line: bytes) -> dict[str, Any]:
    """A line as an object. Raises HarnessError for anything else."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise HarnessError(f"Pi wrote a line that is no JSON: {line[:80]!a}") from error
    if not isinstance(value, dict):
        raise HarnessError(f"Pi wrote a line that is no object: {line[:80]!a}")
    return value


class PiRpc:
    def __init__(self, process: Process) -> None:
        self._process = process
        self.odd = False
        """A line came that Pi does not write, or Pi complained: it must not serve another rollout."""

    async def _next(self, deadline: float, away_s: AwayTime = no_time) -> bytes:
        """Raises TimeoutError, and HarnessError when Pi is gone."""
        while True:
            left = deadline + away_s() - time.monotonic()
            if left <= 0:  # lines that are at hand already would never let a timer run
                raise TimeoutError
            try:
                line = await self._process.readline(left)
                break
            except TimeoutError:
                continue  # the deadline may have moved
        if not line:
            tail = self._process.stderr_tail().decode("utf-8", "replace").strip().splitlines()
            raise HarnessError(f"Pi ended: {tail[-1] if tail else 'no message'}")
        if not _kind(line):
            self.odd = True
        return line

    async def command(self, kind: str, **fields: str) -> None:
        """Send a command and wait until Pi has accepted it. Raises HarnessError when it refuses."""
        deadline = time.monotonic() + COMMAND_S
        number = secrets.token_hex(8)
        await self._process.write(orjson.dumps({"id": number, "type": kind, **fields}) + b"\n")
        while True:
            try:
                line = await self._next(deadline)
            except TimeoutError as error:
                raise HarnessError(f"Pi did not answer `{kind}` within {COMMAND_S:.0f} s") from error
            if _kind(line) != b"response":
                continue
            answer = _parse(line)
            if answer.get("id") != number:
                self.odd = True
            elif answer.get("success") is not True:
                raise HarnessError(f"Pi refused `{kind}`: {_text(answer.get('error')) or 'no reason given'}")
            else:
                return

    async def run(self, message: str, timeout_s: float, away_s: AwayTime = no_time) -> PiRun:
        """One prompt until Pi will do nothing more by itself; `away_s` is added to the time.
        Raises TimeoutError and HarnessError."""
        deadline = time.monotonic() + timeout_s
        await self.command("prompt", message=message)
        log = bytearray()
        error = ""
        while True:
            line = await self._next(deadline, away_s)
            kind = _kind(line)
            if kind not in _QUIET and len(log) + len(line) <= LOG_BYTES:
                log += line
            if kind == b"message_end" and b'"role":"assistant"' in line[:200]:
                error = _error_of(line)
            elif kind == b"agent_settled":
                return PiRun(error=error, log=bytes(log))


def _error_of(line: bytes) -> str:
    if b'"stopReason":"error"' not in line and b'"stopReason":"aborted"' not in line:
        return ""
    message = _parse(line).get("message")
    if not isinstance(message, dict):
        raise HarnessError("Pi ended a message without one")
    reason = message.get("stopReason")
    if reason not in ("error", "aborted"):
        return ""
    return _text(message.get("errorMessage")) or str(reason)


def _text(value: object) -> str:
    """The first line, bounded; empty for what is no text."""
    lines = value.strip().splitlines() if isinstance(value, str) else []
    return lines[0][:300] if lines else ""
