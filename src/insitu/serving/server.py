"""`insitu.serve`: the gateway as a context manager, for agents that the caller runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from math import isfinite
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from insitu.agents.base import model_name
from insitu.config import Config
from insitu.errors import GatewayError
from insitu.gateway.session import Session
from insitu.serving.console import Console
from insitu.serving.served import Served, open_served
from insitu.types import Ledger, Segment, Trajectory

T = TypeVar("T")


class ServedSession:
    """One session of a server: addresses and key for an agent, and its tokens once it is sealed."""

    def __init__(self, server: Server, session: Session, origin: str) -> None:
        """Use `Server.session`."""
        self._server, self._session = server, session
        self._trajectory: Trajectory | None = None
        self.id = session.rollout_id
        self.task = session.task
        self.anthropic_url = self.gemini_url = f"{origin}/s/{session.public_id}"
        """Base URL of these SDKs."""
        self.openai_url = f"{self.anthropic_url}/v1"
        """Base URL of the OpenAI SDK."""
        self.key = session.secret
        self.model = model_name(server.config)
        """Model name that the agent requests."""

    def __repr__(self) -> str:
        return f"ServedSession({self.id!r}, {self.openai_url!r})"

    def seal(self, reward: float | None = None) -> Ledger:
        """End the session, store it as a rollout and return the account of its tokens.

        Without a reward it is not graded. Raises GatewayError when it is sealed already, or the reward is no
        finite number.
        """
        return self._server.call(self._seal(reward))

    async def seal_async(self, reward: float | None = None) -> Ledger:
        """End the session; the coroutine form of `seal`."""
        return await asyncio.wrap_future(self._server.submit(self._seal(reward)))

    def rows(self) -> tuple[Segment, ...]:
        """Return the training rows of the sealed session; raise GatewayError before."""
        return self._sealed.segments

    @property
    def trajectory(self) -> Trajectory:
        """Turns, rows and ledger of the sealed session; raises GatewayError before."""
        return self._sealed

    @property
    def _sealed(self) -> Trajectory:
        if self._trajectory is None:
            raise GatewayError(f"session {self.id} is not sealed: call seal() first")
        return self._trajectory

    async def _seal(self, reward: float | None) -> Ledger:
        if reward is not None and not (isinstance(reward, Real) and isfinite(reward)):
            raise GatewayError(f"session {self.id} stays open: a reward is a finite number, not {reward!r}")
        self._session.reward = None if reward is None else float(reward)
        self._trajectory = await self._server.served.seal(self._session)
        return self._trajectory.ledger


class Server:
    """A served model; a context manager, with `with` and with `async with`.

    It runs on an event loop in a thread of its own, so it works in scripts, notebooks and coroutines alike.
    At its end all sessions are sealed and stored in the run directory, as rollouts.
    """

    def __init__(self, config: Config) -> None:
        """Serve the model of `config`, whose run directory is named."""
        self.config = config
        self.path = Path(config.run.dir)
        """Run directory with the stored sessions; `insitu.open_run` reads it."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="insitu-serve")
        self._started: Future[Served] = Future()
        self._ended: Future[None] | None = None
        self._main: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self._count = 0

    @property
    def address(self) -> str:
        """Address of the gateway, http://127.0.0.1:PORT."""
        return self.served.origin

    @property
    def served(self) -> Served:
        """The running gateway; for calls on the server's loop."""
        return self._started.result()

    def session(self, name: str = "", *, task: str = "") -> ServedSession:
        """Open a session for one run of an agent; `name` becomes its rollout's id.

        Sessions of one `task` (default: the name) form a group. Raises GatewayError for a used name.
        """
        return self.call(self._open(name, task))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and return its result."""
        return self.submit(work).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the server's loop; raise GatewayError when the server does not run."""
        if self._ended is None or self._ended.done():
            work.close()
            raise GatewayError("the server does not run: use it inside `with insitu.serve(...)`")
        return asyncio.run_coroutine_threadsafe(work, self._main.result()[0])

    def start(self) -> None:
        """Start serving; raise InsituError when it fails."""
        self._ended = self._pool.submit(lambda: asyncio.run(self._serve()))
        try:
            either: list[Future[Any]] = [self._started, self._ended]
            wait(either, return_when=FIRST_COMPLETED)
        finally:
            if not self._started.done():
                self.stop()

    def stop(self) -> None:
        """Seal and store the open sessions and stop; raise what ended the server."""
        if self._ended is None:
            return
        if not self._ended.done():
            loop, main = self._main.result()
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                loop.call_soon_threadsafe(main.cancel)
        self._pool.shutdown()
        with contextlib.suppress(asyncio.CancelledError, CancelledError):
            self._ended.result()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop)
            await asyncio.gather(starting, return_exceptions=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))

    async def _open(self, name: str, task: str) -> ServedSession:
        name = name or f"session-{self._count}"
        self._count += 1
        return ServedSession(self, self.served.open(name, task), self.served.origin)

    async def _serve(self) -> None:
        main = asyncio.current_task()
        if main is None:
            raise GatewayError("the server runs outside of a task")
        self._main.set_result((asyncio.get_running_loop(), main))
        async with open_served(self.config, Console(None)) as served:
            self._started.set_result(served)
            await served.expire()
