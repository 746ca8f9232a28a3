"""Who may open a grading box now: up to `count` runs at once, or one that has the grader to itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager


class Permits:
    """Fair in order of asking. A permit must not be held while another is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._gate = asyncio.Lock()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        async with self._free:
            yield

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Waits for every run under way. The gate keeps two that want all from waiting for each other."""
        async with self._gate, AsyncExitStack() as held:
            for _ in range(self._count):
                await held.enter_async_context(self._free)
            yield
