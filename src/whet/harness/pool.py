"""Workers of one harness, leased to one rollout at a time.

A healthy worker goes back to the shelf; any other is closed and replaced at the next lease. In strict mode
no worker serves twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.errors import HarnessError
from whet.harness.base import Harness, Worker


class Sockets:
    """The gateway's sockets that no live box uses: a session belongs to the socket of its box, so two boxes
    on one could use each other's."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._free = list(paths)

    def take(self) -> Path:
        """Raises HarnessError when every socket has its box."""
        if not self._free:
            raise HarnessError("no gateway socket is free for another worker")
        return self._free.pop()

    def give_back(self, path: Path) -> None:
        self._free.append(path)


class WorkerPool:
    """At most `size` workers live, each on a socket of its own: give it `size` sockets."""

    def __init__(self, harness: Harness, size: int, sockets: Sockets, *, strict: bool = False) -> None:
        self._harness = harness
        self._size = size
        self._sockets = sockets
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
        path = self._sockets.take()
        try:
            return await self._harness.worker(path).__aenter__()
        except BaseException:
            self._sockets.give_back(path)
            raise

    async def _end(self, worker: Worker) -> None:
        try:
            await worker.__aexit__(None, None, None)
        finally:
            self._sockets.give_back(worker.gateway_socket)

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
                    await self._end(worker)

    async def _take(self) -> Worker:
        while self._shelf:
            worker = self._shelf.pop()
            if worker.healthy:
                return worker
            await self._end(worker)
        return await self._new()

    async def close(self) -> None:
        """Ends the idle workers; leased ones end when they come back."""
        self._closed = True
        while self._shelf:
            await self._end(self._shelf.pop())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
