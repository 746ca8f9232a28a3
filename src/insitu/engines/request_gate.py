"""Where new calls to a server wait while it sleeps or its weights are on their way.

Only the weights have a limit: a sleep takes as long as whoever has the GPU, a training step of any length.
Callers: vllm_control.py, sglang.py.
"""

from __future__ import annotations

import asyncio

from insitu.engines.downtime import away


class RequestGate:
    """Open when it is made."""

    def __init__(self) -> None:
        self._open, self._awake = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._awake.set()

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def sleeps(self) -> None:
        """Shut from now on, and no limit runs until `woke`."""
        self._open.clear()
        self._awake.clear()

    def woke(self) -> None:
        """Limits run again, also where it could not be woken; `open` opens."""
        self._awake.set()

    async def passed(self, limit_s: float) -> None:
        """Return when it is open. Raises TimeoutError when it is shut for `limit_s` without a sleep."""
        with away():
            while not (self._open.is_set() and self._awake.is_set()):
                await self._awake.wait()
                async with asyncio.timeout(limit_s):
                    await self._open.wait()
