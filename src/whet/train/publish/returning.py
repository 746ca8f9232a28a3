"""A server that died and came back samples on with the run's weights, not with those it was started with.

    generate -> failed? -> wait until it answers -> other weights? -> load what was published last -> again
    sleep, wake -> gone? -> wait until it answers -> again

Whoever keeps the server starts it again; whet waits as long as the configuration says. While the server has
not got its weights back nothing is asked of it. Engines in the learner's process: learner/lifeline.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol

from whet.engine.base import EngineInfo, LoadingEngine, Receipt
from whet.errors import EngineError, EngineUnavailable
from whet.train.publish.files import Publishes, apart
from whet.types import Generation, IntArray, RequestKey, SamplingParams

PAUSE_S = 0.5
"""Between two questions whether it answers again."""


class Restorer(Publishes, Protocol):
    """A publisher that can bring again what it published (files.py, gpu.py)."""

    async def restore(self) -> Receipt:
        """Bring the version that was published last to a server that lost it. Raises EngineError."""


class ReturningEngine:
    """Implements engine.base.Engine over a server, and train.publish.Publisher for it."""

    def __init__(
        self,
        engine: LoadingEngine,
        publisher: Restorer,
        *,
        patience_s: float,
        share_gpu: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """patience_s: how long the server may take to come back. share_gpu: it sleeps while the trainer
        works. `say` gets a line for a person."""
        self._engine, self._publisher, self._share_gpu = engine, publisher, share_gpu
        self._patience_s, self._say = patience_s, say
        self._life = 0
        self._mending = asyncio.Lock()
        """Held while weights are on their way."""

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def receipt(self) -> Receipt:
        return self._engine.receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        while True:
            life = self._life
            try:
                return await self._engine.generate(ids, params, key)
            except EngineError as error:
                if not await self._mended(life, error):
                    raise

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()

    async def publish(self, version: int) -> Receipt:
        """As the publisher, and once more when the server was gone in between."""
        async with self._mending:
            try:
                return await self._publisher.publish(version)
            except EngineUnavailable as error:
                await self._answering(error)
                receipt = await self._publisher.publish(version)
            self._life += 1
            return receipt

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._asleep() if self._share_gpu else apart()

    @asynccontextmanager
    async def _asleep(self) -> AsyncIterator[None]:
        """The engine sleeps meanwhile; its calls under way end first. One that is started again in the middle
        is awake with its own weights: it gets the run's with the next publication or request, not while the
        trainer has the GPU."""
        async with self._mending:
            await self._patiently(self._engine.sleep)
            try:
                yield
            except BaseException:
                # What ended the step is what counts, not that the engine cannot be woken either.
                with suppress(EngineError):
                    await self._patiently(self._engine.wake)
                raise
            await self._patiently(self._engine.wake)

    async def _patiently(self, do: Callable[[], Awaitable[None]]) -> None:
        """Once more when the server was gone in between."""
        try:
            await do()
        except EngineUnavailable as error:
            await self._answering(error)
            await do()

    async def _mended(self, life: int, error: EngineError) -> bool:
        """After a failed request: True when the server had lost its weights and has them again."""
        async with self._mending:
            if self._life != life:
                return True
            if not await self._answering(error):
                return False
            self._say(f"{error}; it gets version {self._engine.receipt.version} back")
            await self._publisher.restore()
            self._life += 1
            return True

    async def _answering(self, error: EngineError) -> bool:
        """Wait until the server answers; True when it does not hold what was published."""
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    try:
                        return await self._engine.version() != self._engine.receipt.version
                    except EngineUnavailable:
                        await asyncio.sleep(PAUSE_S)
                    except EngineError:
                        return True  # weights that nobody published
        except TimeoutError as late:
            raise EngineUnavailable(f"{error}; it did not come back in {self._patience_s:g} s") from late
