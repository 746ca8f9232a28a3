"""Workers of one harness, leased to one rollout at a time.

A healthy worker goes back to the shelf, and serves tasks of its own setup only; any other is closed and
replaced at the next lease. In strict mode no worker serves twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from insitu.agents.base import PLAIN, Harness, Worker
from insitu.errors import HarnessError
from insitu.types import Setup


class Sockets:
    """The gateway's sockets that no live sandbox uses: a session belongs to the socket of its sandbox, so
    two sandboxes on one could use each other's."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._free = list(paths)

    def take(self) -> Path:
        """Raises HarnessError when every socket has its sandbox."""
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
        self._shelf: list[tuple[Setup, Worker]] = []
        """Idle workers, the longest idle first."""
        self._leased = 0
        self._closed = False

    async def warm(self) -> None:
        """Start all workers for plain tasks now, two at a time, so that no rollout waits for a start."""
        gate = asyncio.Semaphore(2)

        async def one() -> Worker:
            async with gate:
                return await self._new(PLAIN)

        missing = 0 if self._strict else self._size - len(self._shelf)
        started = await asyncio.gather(*(one() for _ in range(missing)), return_exceptions=True)
        self._shelf += [(PLAIN, worker) for worker in started if not isinstance(worker, BaseException)]
        for error in started:
            if isinstance(error, BaseException):
                raise error

    async def _new(self, setup: Setup) -> Worker:
        path = self._sockets.take()
        try:
            return await self._harness.worker(path, setup).__aenter__()
        except BaseException:
            self._sockets.give_back(path)
            raise

    async def _end(self, worker: Worker) -> None:
        try:
            await worker.__aexit__(None, None, None)
        finally:
            self._sockets.give_back(worker.gateway_socket)

    @asynccontextmanager
    async def lease(self, setup: Setup = PLAIN) -> AsyncIterator[Worker]:
        """A healthy worker for one rollout of a task with this setup. Raises HarnessError or
        SandboxStartError when none starts."""
        async with self._permits:
            if self._closed:
                raise HarnessError("the worker pool is closed")
            self._leased += 1
            kept = False
            try:
                worker = await self._take(setup)
            except BaseException:
                self._leased -= 1
                raise
            try:
                yield worker
                kept = worker.healthy and not self._strict and not self._closed
            finally:
                self._leased -= 1
                if kept:
                    self._shelf.append((setup, worker))
                else:
                    await self._end(worker)

    async def _take(self, setup: Setup) -> Worker:
        """The worker last used for this setup, or a new one in the place of the longest idle of another."""
        for entry in reversed([entry for entry in self._shelf if entry[0] == setup]):
            self._shelf.remove(entry)
            if entry[1].healthy:
                return entry[1]
            await self._end(entry[1])
        while self._shelf and self._leased + len(self._shelf) > self._size:
            await self._end(self._shelf.pop(0)[1])
        return await self._new(setup)

    async def close(self) -> None:
        """Ends the idle workers; leased ones end when they come back."""
        self._closed = True
        while self._shelf:
            await self._end(self._shelf.pop()[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
