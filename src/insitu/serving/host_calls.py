"""Logging and console output of host tool calls of `insitu serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from insitu.errors import RecordError
from insitu.gateway.host_tools import HostCall
from insitu.gateway.session import Session
from insitu.storage.host_calls import HostCallLog


class HostCallReporter:
    """Writes host tool calls to the log file and reports them as events; not thread-safe."""

    def __init__(
        self, log: HostCallLog, on_event: Callable[[str, Mapping[str, Any], list[str]], None]
    ) -> None:
        """Take the log file and a callback for (event name, JSON fields, text lines)."""
        self._log, self._on_event = log, on_event
        self.error: RecordError | None = None
        """First write error of the log file."""

    def on_call(self, session: Session, call: HostCall) -> None:
        """Log one call."""
        # A write error, such as a full disk, must not fail the agent's call.
        record = {"public_id": session.public_id, **asdict(call)}
        try:
            self._log.keep(session.rollout_id, 1, [record])
        except RecordError as error:
            self.error = self.error or error
        end = f"refused: {call.error}" if call.error else "accepted"
        line = f"{session.rollout_id} host tool {call.name} called by the {call.source}, {end}"
        if call.source == "hook":
            line = f"{session.rollout_id} the hook on tool calls acted on one of {call.name}"
        self._on_event("host_call", {"rollout_id": session.rollout_id, **record}, [line])
