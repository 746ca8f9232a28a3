"""Workers of one harness, leased to one rollout at a time.

A healthy worker goes back to the shelf; any other is closed and replaced at the next lease. In strict mode
no worker serves twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.errors import HarnessError
from whet.harness.base import Harness, Worker


class WorkerPool:
    """At most `size` workers live. `socket_factory` names the gateway socket of each new worker."""

    def __init__(
        self, harness: Harness, size: int, socket_factory: Callable[[], Path], *, strict: bool = False
    ) -> None:
        self._harness = harness
        self._size = size
        self._socket_factory = socket_factory
        self._strict = strict
        self._permits = asyncio.Semaphore(size)
        self._shelf: list[Worker] = []
        self._closed = False

    async def warm(self) -> None:
        """Start all workers now, two at a time, so that no rollout waits for a start."""
        gate = asyncio.Semaphore(2)

        async def one() -> Worker:
            async with gate:
                return await self._new()

        missing = 0 if self._strict else self._size - len(self._shelf)
        started = await asyncio.gather(*(one() for _ in range(missing)), return_exceptions=True)
        self._shelf += [worker for worker in started if not isinstance(worker, BaseException)]
        for error in started:
            if isinstance(error, BaseException):
                raise error

    async def _new(self) -> Worker:
        return await self._harness.worker(self._socket_factory()).__aenter__()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Worker]:
        """A healthy worker for one rollout. Raises HarnessError or SandboxStartError when none starts."""
        async with self._permits:
            if self._closed:
                raise HarnessError("the worker pool is closed")
            worker = await self._take()
            kept = False
            try:
                yield worker
                kept = worker.healthy and not self._strict and not self._closed
            finally:
                if kept:
                    self._shelf.append(worker)
                else:
                    await worker.__aexit__(None, None, None)

    async def _take(self) -> Worker:
        while self._shelf:
            worker = self._shelf.pop()
            if worker.healthy:
                return worker
            await worker.__aexit__(None, None, None)
        return await self._new()

    async def close(self) -> None:
        """Ends the idle workers; leased ones end when they come back."""
        self._closed = True
        while self._shelf:
            await self._shelf.pop().__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
