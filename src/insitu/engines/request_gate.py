"""Gate that holds new calls to a server while it sleeps or loads weights.

Only loading has a timeout: a sleep may last a whole training step.
"""

from __future__ import annotations

import asyncio

from insitu.engines.downtime import engine_down


class RequestGate:
    """Gate for new calls; initially open."""

    def __init__(self) -> None:
        self._open, self._awake = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._awake.set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def sleep(self) -> None:
        """Close the gate and suspend timeouts until `wake`."""
        self._open.clear()
        self._awake.clear()

    def wake(self) -> None:
        """Resume timeouts, also after a failed wake-up; `open` opens the gate."""
        self._awake.set()

    async def wait(self, limit_s: float) -> None:
        """Return when the gate is open; raise TimeoutError after `limit_s` without a sleep."""
        with engine_down():
            while not (self._open.is_set() and self._awake.is_set()):
                await self._awake.wait()
                async with asyncio.timeout(limit_s):
                    await self._open.wait()
