"""Calls of host tools while `insitu serve` runs: told and written down as they come. Caller: run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from insitu.errors import RecordError
from insitu.gateway.host_tools import HostCall
from insitu.gateway.session import Session
from insitu.storage.host_calls import HostCallLog


class Reports:
    """What agents and models report through host tools. One event loop owns it."""

    def __init__(self, log: HostCallLog, say: Callable[[str, Mapping[str, Any], list[str]], None]) -> None:
        """`say` gets an event, what it tells machines, and lines for people."""
        self._log, self._say = log, say
        self.trouble: RecordError | None = None
        """Why a call is not in the file."""

    def heard(self, session: Session, call: HostCall) -> None:
        """The agent has its acknowledgement whatever becomes of the file: a full disk is the operator's."""
        held = {"public_id": session.public_id, **asdict(call)}
        try:
            self._log.keep(session.rollout_id, 1, [held])
        except RecordError as error:
            self.trouble = self.trouble or error
        end = f"refused: {call.error}" if call.error else "accepted"
        line = f"{session.rollout_id} host tool {call.name} called by the {call.source}, {end}"
        self._say("host_call", {"rollout_id": session.rollout_id, **held}, [line])
