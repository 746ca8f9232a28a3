"""Refused calls, as an operator may watch them: all are counted, and a storm of them is a line per second.

Of one cause in one session the first refusal is told at once; those of the next second follow as one report
with their number. Caller: server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from insitu.gateway.response_writer import CallReport

EVERY_S = 1.0
MOST = 64
"""Causes and sessions that are told apart at a time; beyond them the session is not named."""
Key = tuple[str, str, str]
"""Rollout id, wire format, cause."""


class Refusals:
    """Lives on the gateway's event loop."""

    def __init__(self, tell: Callable[[CallReport], None], every_s: float = EVERY_S) -> None:
        self._tell, self._every_s = tell, every_s
        self._held: dict[Key, int] = {}
        """Refusals since the last report, by key; a key goes when there was none for a while."""
        self._why: dict[Key, str] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, rollout_id: str, dialect: str, cause: str, dead: str = "") -> None:
        """One more call that was refused before it had a turn. `rollout_id`: empty for a key that opens no
        session. `dead`: `CallReport.dead`."""
        key = rollout_id, dialect, cause
        if key not in self._held and len(self._held) >= MOST:
            key = "", dialect, cause
        if key in self._held:
            self._held[key] += 1
            self._why[key] = dead
        else:
            self._report(key, 1, dead)

    def close(self) -> None:
        """Tell what is held."""
        for timer in self._timers.values():
            timer.cancel()
        for key, count in self._held.items():
            if count:
                self._tell(_told(key, count, self._why[key]))
        for told in (self._timers, self._held, self._why):
            told.clear()

    def _report(self, key: Key, count: int, dead: str) -> None:
        self._held[key], self._why[key] = 0, dead
        self._timers[key] = asyncio.get_running_loop().call_later(self._every_s, self._due, key)
        self._tell(_told(key, count, dead))

    def _due(self, key: Key) -> None:
        count, dead = self._held.pop(key), self._why.pop(key)
        del self._timers[key]
        if count:
            self._report(key, count, dead)


def _told(key: Key, count: int, dead: str) -> CallReport:
    rollout_id, dialect, cause = key
    return CallReport(rollout_id=rollout_id, turn=-1, dialect=dialect, outcome=cause, count=count, dead=dead)
