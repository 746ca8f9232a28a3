"""Restores a run's weights in a server that was restarted, and retries requests meanwhile.

    generate -> failed? -> wait until it answers -> other weights? -> load the last published -> retry
    sleep, wake -> failed? -> wait until it answers -> retry

The server is restarted by others; the wait is limited by the configuration. No request is sent until the
weights are back. For the engine in the learner's process see learner/supervisor.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Protocol

from insitu.engines.base import EngineWrapper, LoadingEngine, Receipt
from insitu.engines.downtime import engine_down
from insitu.errors import EngineError, EngineUnavailable
from insitu.training.weights.files import SupportsPublish
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

PAUSE_S = 0.5
"""Between two health checks."""
ASK_S = 5.0
"""Timeout of one more health check after the wait has expired."""


class RestorablePublisher(SupportsPublish, Protocol):
    """A publisher that can repeat its last publication (files.py, gpu.py)."""

    async def restore(self) -> Receipt:
        """Load the last published version into a restarted server. Raises EngineError."""


class StaticWeights:
    """A `RestorablePublisher` for a server that keeps the weights it was started with."""

    def __init__(self, engine: LoadingEngine) -> None:
        self._engine = engine

    async def publish(self, version: int) -> Receipt:
        raise EngineError(f"version {version} cannot be published: this server keeps its weights")

    async def restore(self) -> Receipt:
        return await self._engine.recognise()


class ReconnectingEngine(EngineWrapper):
    """An `engines.base.Engine` over a server, and the `Publisher` for it."""

    def __init__(
        self,
        engine: LoadingEngine,
        publisher: RestorablePublisher,
        *,
        max_wait_s: float,
        restarts: int = 3,
        share_gpu: bool = False,
        published: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Wrap an engine.

        max_wait_s: how long a restart may take. restarts: how many restarts between two publications.
        share_gpu: the engine sleeps during training. published: False = weights never change, so `restarts`
        is per request, and interrupted requests are retried too. say: receives warnings.
        """
        super().__init__(engine)
        self._engine, self._publisher, self._share_gpu = engine, publisher, share_gpu
        self._published = published
        self._max_wait_s, self._restarts, self._say = max_wait_s, restarts, say
        self._generation = 0
        self._restores = 0
        """Since the last publication."""
        self._down_since: float | None = None
        """When it first failed to answer; None after an answer. All requests share this wait."""
        self._last_check = -math.inf
        """When the last health check failed."""
        self._lock = asyncio.Lock()
        """Held while weights are being loaded."""

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        attempts = 0
        while True:
            generation = self._generation
            try:
                made = await self._engine.generate(ids, params, key)
            except EngineError as error:
                with engine_down():
                    restored = await self._restore_weights(generation, error)
                interrupted = not self._published and isinstance(error, EngineUnavailable)
                if not (restored or interrupted) or (not self._published and attempts >= self._restarts):
                    raise
                attempts += 1
            else:
                self._down_since = None
                return made

    async def publish(self, version: int) -> Receipt:
        """Publish, with one retry when the server was restarted."""
        async with self._lock:
            try:
                receipt = await self._publisher.publish(version)
            except EngineUnavailable as error:
                await self._wait_until_up(error)
                receipt = await self._publisher.publish(version)
            self._down_since, self._restores = None, 0
            self._generation += 1  # earlier failures were of another server, or of other weights
            return receipt

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._asleep() if self._share_gpu else nullcontext()

    @asynccontextmanager
    async def _asleep(self) -> AsyncIterator[None]:
        """Let the engine sleep meanwhile; its running calls end first.

        A server restarted meanwhile is awake with its own weights: it gets the run's at the next publication
        or request, not while the trainer uses the GPU.
        """
        async with self._lock:
            await self._retry_once(self._engine.sleep)
            try:
                yield
            except BaseException:
                # the error of the step matters more than a failed wake-up
                with suppress(EngineError):
                    await self._retry_once(self._engine.wake)
                raise
            await self._retry_once(self._engine.wake)

    async def _retry_once(self, do: Callable[[], Awaitable[None]]) -> None:
        """Call, with one retry when the server was restarted."""
        try:
            await do()
        except EngineUnavailable as error:
            await self._wait_until_up(error)
            await do()

    async def _restore_weights(self, generation: int, error: EngineError) -> bool:
        """Return whether the server had lost its weights, after restoring them."""
        failed = _now()
        async with self._lock:
            if self._generation != generation:
                return True
            if not await self._wait_until_up(error, failed):
                return False
            held = self._engine.receipt.version
            if self._published and self._restores >= self._restarts:
                raise EngineUnavailable(
                    f"{error}; the server was restarted more than {self._restarts} times since version {held}"
                )
            self._restores += 1
            self._say(f"{error}; restoring version {held}")
            await self._publisher.restore()
            self._generation += 1
            return True

    async def _wait_until_up(self, error: EngineError, failed: float | None = None) -> bool:
        """Wait until the server answers; return whether its weights are not the published ones.

        failed: when the request failed; a wait that expired since then is not repeated.
        """
        if self._down_since is None:
            self._down_since = _now()
        ends = self._down_since + self._max_wait_s
        over = _now() >= ends
        if over and failed is not None and self._last_check >= failed:
            raise self._late(error)
        try:
            async with asyncio.timeout_at(_now() + ASK_S if over else ends):
                while True:
                    try:
                        other = await self._engine.version() != self._engine.receipt.version
                    except EngineUnavailable:
                        if over:
                            break
                        await asyncio.sleep(PAUSE_S)
                        continue
                    except EngineError:
                        other = True  # unknown weights
                    self._down_since = None
                    return other
        except TimeoutError:
            pass
        self._last_check = _now()
        raise self._late(error)

    def _late(self, error: EngineError) -> EngineUnavailable:
        return EngineUnavailable(f"{error}; the server did not come back within {self._max_wait_s:g} s")


def _now() -> float:
    return asyncio.get_running_loop().time()
