"""Pool of workers, each leased to one rollout at a time.

A healthy worker becomes idle after its lease and serves only tasks of its own agent and setup; others are
closed and replaced. In strict mode no worker is reused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from insitu.agents.base import PLAIN, Harness, Worker
from insitu.errors import HarnessError
from insitu.types import Setup

_Kind = tuple[Harness, Setup]


class Sockets:
    """Gateway sockets that are not in use by a sandbox."""

    # Sessions are bound to the socket of their sandbox: sandboxes that shared one could use each other's.

    def __init__(self, paths: Iterable[Path]) -> None:
        self._free = list(paths)

    def take(self) -> Path:
        """Return a free socket.

        Raises HarnessError when there is none.
        """
        if not self._free:
            raise HarnessError("no gateway socket is free for another worker")
        return self._free.pop()

    def give_back(self, path: Path) -> None:
        self._free.append(path)


class WorkerPool:
    """Pool of at most `size` workers, each with its own socket; needs `size` sockets."""

    def __init__(
        self, harness: Harness, size: int, sockets: Sockets, *, strict: bool = False, gateway_url: str = ""
    ) -> None:
        """Create a pool; `harness`: the agent of `warm` and of leases that name none.

        `gateway_url`: for sandboxes that reach no socket.
        """
        self._harness = harness
        self._size = size
        self._sockets = sockets
        self._strict = strict
        self._gateway_url = gateway_url
        self._permits = asyncio.Semaphore(size)
        self._idle: list[tuple[_Kind, Worker]] = []
        """Idle workers, longest idle first."""
        self._leased = 0
        self._closed = False

    async def warm(self) -> None:
        """Start all workers for plain tasks in advance, two at a time."""
        gate = asyncio.Semaphore(2)

        async def one() -> Worker:
            async with gate:
                return await self._new((self._harness, PLAIN))

        missing = 0 if self._strict else self._size - len(self._idle)
        started = await asyncio.gather(*(one() for _ in range(missing)), return_exceptions=True)
        self._idle += [
            ((self._harness, PLAIN), worker) for worker in started if not isinstance(worker, BaseException)
        ]
        for error in started:
            if isinstance(error, BaseException):
                raise error

    async def _new(self, kind: _Kind) -> Worker:
        path = self._sockets.take()
        try:
            return await kind[0].worker(path, kind[1], self._gateway_url).__aenter__()
        except BaseException:
            self._sockets.give_back(path)
            raise

    async def _end(self, worker: Worker) -> None:
        try:
            await worker.__aexit__(None, None, None)
        finally:
            self._sockets.give_back(worker.gateway_socket)

    @asynccontextmanager
    async def lease(self, setup: Setup = PLAIN, harness: Harness | None = None) -> AsyncIterator[Worker]:
        """Lease a healthy worker for one rollout of a task with this setup.

        Raises HarnessError or SandboxStartError when none can be started.
        """
        kind = (harness or self._harness, setup)
        async with self._permits:
            if self._closed:
                raise HarnessError("the worker pool is closed")
            self._leased += 1
            reusable = False
            try:
                worker = await self._take(kind)
            except BaseException:
                self._leased -= 1
                raise
            try:
                yield worker
                reusable = worker.healthy and not self._strict and not self._closed
            finally:
                self._leased -= 1
                if reusable:
                    self._idle.append((kind, worker))
                else:
                    await self._end(worker)

    async def _take(self, kind: _Kind) -> Worker:
        """Return the last idle worker of this kind, else a new one, closing others if the pool is full."""
        for entry in reversed([entry for entry in self._idle if entry[0] == kind]):
            self._idle.remove(entry)
            if entry[1].healthy:
                return entry[1]
            await self._end(entry[1])
        while self._idle and self._leased + len(self._idle) > self._size:
            await self._end(self._idle.pop(0)[1])
        return await self._new(kind)

    async def close(self) -> None:
        """Close the idle workers; leased ones are closed when they are returned."""
        self._closed = True
        while self._idle:
            await self._end(self._idle.pop()[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
