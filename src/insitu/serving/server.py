"""`insitu.serve`: the gateway as a context manager, for agents that the caller runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from insitu.agents.base import model_name
from insitu.config import Config
from insitu.errors import GatewayError
from insitu.gateway.session import Session
from insitu.serving.console import Console
from insitu.serving.run import Served, open_served, open_session
from insitu.serving.session_export import Ledgers, export, finish
from insitu.storage.run_dir import SESSIONS, RunDir
from insitu.types import Ledger, Segment, Trajectory

T = TypeVar("T")
SEAL_S = 10.0
"""Time that running calls get to finish when their session is sealed."""


class ServedSession:
    """One session of a server: addresses and key for an agent, and its tokens once it is sealed."""

    def __init__(self, server: Server, session: Session, origin: str) -> None:
        """Use `Server.session`."""
        self._server, self._session = server, session
        self._trajectory: Trajectory | None = None
        self.id = session.rollout_id
        self.anthropic_url = self.gemini_url = f"{origin}/s/{session.public_id}"
        """Base URL of these SDKs."""
        self.openai_url = f"{self.anthropic_url}/v1"
        """Base URL of the OpenAI SDK."""
        self.key = session.secret
        self.model = model_name(server.config)
        """Model name that the agent requests."""
        self.reward: float | None = None

    def __repr__(self) -> str:
        return f"ServedSession({self.id!r}, {self.openai_url!r})"

    def seal(self, reward: float | None = None) -> Ledger:
        """End the session, write its export and return the account of its tokens.

        Raises GatewayError when it is sealed already.
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
        self.reward = reward
        self._trajectory = await self._session.seal(SEAL_S)
        self._server.export(self, self._session, self._trajectory)
        return self._trajectory.ledger


class Server:
    """A served model; a context manager, with `with` and with `async with`.

    It runs on an event loop in a thread of its own, so it works in scripts, notebooks and coroutines alike.
    At its end all sessions are sealed and exported to the run directory.
    """

    def __init__(self, config: Config) -> None:
        """Serve the model of `config`, whose run directory is named."""
        self.config = config
        self.path = Path(config.run.dir)
        """Run directory with the exported sessions."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="insitu-serve")
        self._started: Future[Served] = Future()
        self._ended: Future[None] | None = None
        self._main: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self._sessions: list[Session] = []
        self._ledgers: Ledgers = {}
        self._count = 0

    @property
    def address(self) -> str:
        """Address of the gateway, http://127.0.0.1:PORT."""
        return self._started.result().origin

    def session(self, name: str = "") -> ServedSession:
        """Open a session for one run of an agent; `name` becomes its id and the name of its export."""
        return self.call(self._open(name))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and return its result."""
        return self.submit(work).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the server's loop; raise GatewayError when the server does not run."""
        if self._ended is None or self._ended.done():
            work.close()
            raise GatewayError("the server does not run: use it inside `with insitu.serve(...)`")
        return asyncio.run_coroutine_threadsafe(work, self._main.result()[0])

    def export(self, served: ServedSession, session: Session, trajectory: Trajectory) -> None:
        """Write a sealed session to the run directory."""
        self._sessions.remove(session)
        numbers = export(Console(None), self.path / SESSIONS, served.id, session, trajectory)
        self._ledgers[served.id] = {**numbers, "reward": served.reward}

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
        """Seal and export the open sessions and stop; raise what ended the server."""
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

    async def _open(self, name: str) -> ServedSession:
        served, name = self._started.result(), name or f"session-{self._count}"
        self._count += 1
        if name in self._ledgers or any(session.rollout_id == name for session in self._sessions):
            raise GatewayError(f"session {name} exists already")
        session = open_session(served, name)
        self._sessions.append(session)
        return ServedSession(self, session, served.origin)

    async def _serve(self) -> None:
        main = asyncio.current_task()
        if main is None:
            raise GatewayError("the server runs outside of a task")
        self._main.set_result((asyncio.get_running_loop(), main))
        console = Console(None)
        with RunDir.create(self.config) as run:
            async with open_served(run, console) as served:
                self._started.set_result(served)
                try:
                    await asyncio.Event().wait()
                finally:
                    await finish(console, run, self._sessions, served.gateway, None, self._ledgers)
