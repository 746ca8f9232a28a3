"""Permits for live boxes, and bounded retries of a start that failed for the host's reasons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from whet.errors import SandboxStartError
from whet.sandbox.base import Sandbox, SandboxBackend, SandboxSpec


class SandboxPool:
    """At most `permits` boxes of one backend live at a time; each box is fresh and used once."""

    def __init__(
        self, backend: SandboxBackend, permits: int, *, attempts: int = 3, backoff_s: float = 0.2
    ) -> None:
        self._backend = backend
        self._permits = asyncio.Semaphore(permits)
        self._attempts = attempts
        self._backoff_s = backoff_s

    @asynccontextmanager
    async def box(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A new box, closed at the end. Raises SandboxStartError after the last attempt; a spec that asks
        for too much is refused at once."""
        async with self._permits:
            sandbox = await self._start(spec)
            async with sandbox:
                yield sandbox

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        for attempt in range(1, self._attempts):
            try:
                return await self._backend.create(spec)
            except SandboxStartError:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
        return await self._backend.create(spec)
