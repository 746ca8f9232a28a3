"""A rollout source for trainers without an event loop: its connection lives on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from insitu.config import Config
from insitu.errors import EngineError
from insitu_bridges.process import SourceProcess, open_source

T = TypeVar("T")


class SourceThread:
    """An open source; the constructor returns when it is ready, or raises what its start raised."""

    def __init__(self, config: Config) -> None:
        self._ready: Future[SourceProcess] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        # A trainer that ends without `close` must not wait for it; the child ends with the connection.
        self._thread = Thread(target=self._run, args=(config,), name="insitu-source", daemon=True)
        self._thread.start()
        self.source = self._ready.result()

    def submit(self, make: Callable[[SourceProcess], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a coroutine of the source on its loop."""
        if not self._thread.is_alive():
            raise EngineError("the rollout source is closed")
        return asyncio.run_coroutine_threadsafe(make(self.source), self._loop)

    def call(self, make: Callable[[SourceProcess], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the source to its end and return its result."""
        return self.submit(make).result()

    def close(self) -> None:
        """End the child, its agents and sandboxes. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, config: Config) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main(config))

    async def _main(self, config: Config) -> None:
        try:
            async with open_source(config) as source:
                self._ready.set_result(source)
                await self._stop.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
