"""Client of Pi's RPC protocol: JSON lines on the stdin and stdout of one `pi --mode rpc` process.

One command at a time. All lines are read, so that Pi does not block on a full pipe; only relevant ones are
parsed. Commands run by the agent may write to the pipe, so malformed lines raise HarnessError, a response
must have the random id of its command, and after an unexpected line the process is not reused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import orjson

from insitu.agents.base import Clock, loop_time
from insitu.errors import HarnessError
from insitu.sandbox.base import Process

COMMAND_S = 30.0
LOG_BYTES = 64 << 10
_QUIET = frozenset({b"message_update", b"tool_execution_update", b"agent_end", b"turn_end", b"message_start"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PiRun:
    """Result of one prompt; `error` is Pi's error of the last model call, empty on success."""

    error: str
    log: bytes
    """Event lines without streaming updates, bounded."""


def _kind(line: bytes) -> bytes:
    """Return the event's type without parsing the line; Pi's lines start with the type or an id."""
    head = line[:96]
    start = head.find(b'"type":"')
    return head[start + 8 : head.find(b'"', start + 8)] if start >= 0 and head.startswith(b"{") else b""


def _parse(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object.

    Raises HarnessError for anything else.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise HarnessError(f"Pi wrote a line that is not JSON: {line[:80]!a}") from error
    if not isinstance(value, dict):
        raise HarnessError(f"Pi wrote a line that is not a JSON object: {line[:80]!a}")
    return value


class PiRpc:
    def __init__(self, process: Process) -> None:
        self._process = process
        self.tampered = False
        """An unexpected line was read: the process must not serve another rollout."""

    async def _next(self, deadline: float, clock: Clock = loop_time) -> bytes:
        """Read one line.

        Raises TimeoutError, and HarnessError when Pi has ended.
        """
        while True:
            remaining_s = deadline - clock()
            if remaining_s <= 0:  # Buffered lines are returned at once, so no timer would fire.
                raise TimeoutError
            try:
                line = await self._process.readline(remaining_s)
                break
            except TimeoutError:
                continue  # The clock may have been paused.
        if not line:
            tail = self._process.stderr_tail().decode("utf-8", "replace").strip().splitlines()
            raise HarnessError(f"Pi ended: {tail[-1] if tail else 'no message'}")
        if not _kind(line):
            self.tampered = True
        return line

    async def command(self, kind: str, **fields: str) -> None:
        """Send a command and wait until Pi accepts it.

        Raises HarnessError when Pi rejects it or does not respond.
        """
        deadline = loop_time() + COMMAND_S
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
                self.tampered = True
            elif answer.get("success") is not True:
                raise HarnessError(f"Pi refused `{kind}`: {_text(answer.get('error')) or 'no reason given'}")
            else:
                return

    async def run(self, message: str, timeout_s: float, clock: Clock = loop_time) -> _PiRun:
        """Send one prompt and wait until Pi is idle.

        `clock` measures the timeout. Raises TimeoutError and HarnessError.
        """
        deadline = clock() + timeout_s
        await self.command("prompt", message=message)
        log = bytearray()
        error = ""
        while True:
            line = await self._next(deadline, clock)
            kind = _kind(line)
            if kind not in _QUIET and len(log) + len(line) <= LOG_BYTES:
                log += line
            if kind == b"message_end" and b'"role":"assistant"' in line[:200]:
                error = _error_of(line)
            elif kind == b"agent_settled":
                return _PiRun(error=error, log=bytes(log))


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
    """Return the first line, bounded; empty when `value` is not a string."""
    lines = value.strip().splitlines() if isinstance(value, str) else []
    return lines[0][:300] if lines else ""
