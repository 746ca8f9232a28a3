"""A server that died and came back samples on with the run's weights, not with those it was started with.

    generate -> failed? -> wait until it answers -> other weights? -> load what was published last -> again
    sleep, wake -> gone? -> wait until it answers -> again

Whoever keeps the server starts it again; insitu waits as long as the configuration says. While the server has
not got its weights back nothing is asked of it. Engines in the learner's process: learner/supervisor.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Protocol

from insitu.engines.base import LoadingEngine, Receipt
from insitu.engines.downtime import engine_down
from insitu.engines.wrapper import EngineWrapper
from insitu.errors import EngineError, EngineUnavailable
from insitu.training.weights.files import SupportsPublish
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

PAUSE_S = 0.5
"""Between two questions whether it answers again."""
ASK_S = 5.0
"""For one more question once the patience is over."""


class RestorablePublisher(SupportsPublish, Protocol):
    """A publisher that can bring again what it published (files.py, gpu.py)."""

    async def restore(self) -> Receipt:
        """Bring the version that was published last to a server that lost it. Raises EngineError."""


class StaticWeights:
    """A `RestorablePublisher` where nothing is published: a server keeps the weights that it is started
    with."""

    def __init__(self, engine: LoadingEngine) -> None:
        self._engine = engine

    async def publish(self, version: int) -> Receipt:
        raise EngineError(f"nobody trains here: there is no version {version} to publish")

    async def restore(self) -> Receipt:
        return await self._engine.recognise()


class ReconnectingEngine(EngineWrapper):
    """Implements engines.base.Engine over a server, and training.weights.Publisher for it."""

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
        """max_wait_s: how long the server may take to come back. restarts: how often it may, before it is
        published to again: what kills it again and again has a cause. share_gpu: it sleeps while the trainer
        works. published: False = nothing ever is, so that `restarts` holds for each request, and one that
        the server broke off is made again too. `say` gets a line for a person."""
        super().__init__(engine)
        self._engine, self._publisher, self._share_gpu = engine, publisher, share_gpu
        self._published = published
        self._max_wait_s, self._restarts, self._say = max_wait_s, restarts, say
        self._life = 0
        self._returns = 0
        """Since the last publication."""
        self._gone_since: float | None = None
        """When it was first found gone; None once it has answered. All who wait share one patience."""
        self._asked = -math.inf
        """When it last left a question unanswered."""
        self._mending = asyncio.Lock()
        """Held while weights are on their way."""

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        again = 0
        while True:
            life = self._life
            try:
                made = await self._engine.generate(ids, params, key)
            except EngineError as error:
                with engine_down():
                    mended = await self._mended(life, error)
                broken_off = not self._published and isinstance(error, EngineUnavailable)
                if not (mended or broken_off) or (not self._published and again >= self._restarts):
                    raise
                again += 1
            else:
                self._gone_since = None
                return made

    async def publish(self, version: int) -> Receipt:
        """As the publisher, and once more when the server was gone in between."""
        async with self._mending:
            try:
                receipt = await self._publisher.publish(version)
            except EngineUnavailable as error:
                await self._answering(error)
                receipt = await self._publisher.publish(version)
            self._gone_since, self._returns = None, 0
            self._life += 1  # what failed before failed of another server, or of other weights
            return receipt

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._asleep() if self._share_gpu else nullcontext()

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
        failed = _now()
        async with self._mending:
            if self._life != life:
                return True
            if not await self._answering(error, failed):
                return False
            held = self._engine.receipt.version
            if self._published and self._returns >= self._restarts:
                raise EngineUnavailable(
                    f"{error}; it lost its weights more than {self._restarts} times since version {held}"
                )
            self._returns += 1
            self._say(f"{error}; it gets version {held} back")
            await self._publisher.restore()
            self._life += 1
            return True

    async def _answering(self, error: EngineError, failed: float | None = None) -> bool:
        """Wait until the server answers; True when it does not hold what was published. `failed`: when what
        is waited for failed; a wait that ended in vain since then counts for it too."""
        if self._gone_since is None:
            self._gone_since = _now()
        ends = self._gone_since + self._max_wait_s
        over = _now() >= ends
        if over and failed is not None and self._asked >= failed:
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
                        other = True  # weights that nobody published
                    self._gone_since = None
                    return other
        except TimeoutError:
            pass
        self._asked = _now()
        raise self._late(error)

    def _late(self, error: EngineError) -> EngineUnavailable:
        return EngineUnavailable(f"{error}; it did not come back in {self._max_wait_s:g} s")


def _now() -> float:
    return asyncio.get_running_loop().time()
