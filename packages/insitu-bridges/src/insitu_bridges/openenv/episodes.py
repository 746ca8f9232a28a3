"""Episodes of a terminal: one sandbox each, graded in another one; on an event loop in a thread of its own.

    open(task) -> Episode.run(command)* -> Episode.grade() -> Graded     Episode.close() at any time

The sandbox is dead before anything is judged, and the verdict is made on the host: no file, output or request
of the agent is read as a reward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, TypeVar

from insitu.agents.artifacts import AGENT_MEMORY_BYTES, AGENT_PROCESSES, attribute_loss, collect_tree
from insitu.agents.worker import write_task_files
from insitu.config import Config
from insitu.errors import ConfigError, InsituError, SandboxLost, SandboxStartError
from insitu.grading.judge import TaskJudge
from insitu.runtime.run import make_judge
from insitu.runtime.sandboxes import check_tasks, make_pool
from insitu.sandbox.base import ExecResult, Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.base_tree import is_plain, set_up
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.tasks.mix import TaskSet
from insitu.types import FailingCheck, Outcome, Task, Tree
from insitu_bridges.openenv.tasks import EpisodeTasks

log = logging.getLogger(__name__)
T = TypeVar("T")
Note = Callable[[ExecResult], None]

OUTPUT_BYTES = 64 << 10
"""Most bytes of a command's output that are returned."""
CLOSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """Result of one command in an episode."""

    text: str
    exit_code: int | None
    """None when the sandbox was lost."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Result of an episode."""

    reward: float | None
    """None = not graded: the host failed."""
    outcome: str = "infra"
    reason: str = ""
    """For the operator; the agent never gets it."""
    passed: int = 0
    total: int = 0
    failing: Sequence[FailingCheck] = ()
    """The first checks that failed."""


class Episode:
    """One task in one sandbox; made by `Episodes.open`, used on its loop."""

    def __init__(self, task: Task, backend: SandboxBackend, judge: TaskJudge) -> None:
        self.task = task
        self._backend, self._judge = backend, judge
        self._sandbox: Sandbox | None = None
        self._lost: str | None = None
        """Why the sandbox was lost by the agent's doing."""
        self._spec = SandboxSpec.of(
            task.setup,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            network="none",
            memory_bytes=AGENT_MEMORY_BYTES if "resource_limits" in backend.capabilities else None,
            max_processes=AGENT_PROCESSES if "resource_limits" in backend.capabilities else None,
            label=f"episode/{task.id}",
        )

    async def start(self, note: Note) -> None:
        """Open the sandbox with the task's files; `note` gets each setup command. Raises SandboxError."""
        self._sandbox = await self._backend.create(self._spec)
        try:
            async with asyncio.timeout(self.task.setup.timeout_s + self.task.limits.wall_s):
                await set_up(self._sandbox, self.task.setup, note)
                await write_task_files(self._sandbox, self.task)
        except TimeoutError as error:
            await self.close()
            raise SandboxStartError("the task's files were not written in time") from error
        except BaseException:
            await self.close()
            raise

    async def run(self, command: str, timeout_s: float) -> CommandOutput:
        """Run a shell command in the work folder. Raises SandboxError when the host failed."""
        if self._sandbox is None:
            return CommandOutput(text=self._lost or "the episode is over", exit_code=None)
        argv = ["/bin/sh", "-c", command]
        try:
            done = await self._sandbox.exec(argv, timeout_s=timeout_s, max_output_bytes=OUTPUT_BYTES)
        except SandboxLost as error:
            self._lost = await attribute_loss(error, self._backend, self._spec, self._sandbox)
            await self.close()
            return CommandOutput(text=self._lost, exit_code=None)
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        if done.truncated:
            text += "\n(output truncated)"
        if done.timed_out:
            text += f"\n(stopped after {timeout_s:g} s)"
        return CommandOutput(text=text, exit_code=done.exit_code, timed_out=done.timed_out)

    async def grade(self) -> Graded:
        """End the sandbox and grade what was in its work folder."""
        tree: Tree = {}
        try:
            if self.task.grading.where == "live":
                if self._sandbox is None:
                    return Graded(reward=0.0, outcome=str(Outcome.UNRESOLVED), reason=self._lost or "")
                verdict = await self._judge.live(self.task, self._sandbox)
            else:
                if self._sandbox is not None:
                    plain = is_plain(self.task.setup)
                    tree, lost = await collect_tree(self._sandbox, self._backend, self._spec, plain=plain)
                    self._lost = lost or self._lost
                await self.close()
                verdict = await self._judge(self.task, tree)
        except InsituError as error:
            log.warning("episode task=%s reason=%s", self.task.id, error)
            return Graded(reward=None, reason=str(error))
        finally:
            await self.close()
        reason = "; ".join(part for part in (self._lost, verdict.reason) if part)
        return Graded(
            reward=None if verdict.outcome is Outcome.INFRA else verdict.reward,
            outcome=str(verdict.outcome),
            reason=reason,
            passed=verdict.passed,
            total=verdict.total,
            failing=verdict.evidence or (),
        )

    async def close(self) -> None:
        """End the sandbox. May be called twice."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


class Episodes:
    """Sandboxes, grader and tasks of one configuration, shared by the environments of a server."""

    def __init__(self, config: Config) -> None:
        """Check the configuration; raise ConfigError, SetupError, TaskError. Nothing is started."""
        self.config = config
        self.tasks = EpisodeTasks(config)
        examples = TaskSet(arm=config.set_arms[0], source=self.tasks.source).examples()
        check_tasks(config, examples)
        if several := next((task.id for task in examples if task.steps), ""):
            raise ConfigError(f"task {several} has several steps, and an episode is one")
        self._pool = make_pool(config)
        self._judge: TaskJudge
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = AsyncExitStack()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, which the first call starts."""
        with self._lock:
            if self._loop is None:
                self._loop = self._start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result."""
        return self.submit(work).result()

    async def open(self, task: Task, note: Note = lambda done: None) -> Episode:
        """Start an episode; `note` gets the result of each of its setup commands. Raises SandboxError."""
        episode = Episode(task, self._pool, self._judge)
        await episode.start(note)
        return episode

    def close(self) -> None:
        """End grader, spare sandboxes and the thread; episodes are closed by their owners before."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), loop).result(CLOSE_S)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(CLOSE_S)
            loop.close()

    def _start(self) -> asyncio.AbstractEventLoop:
        remove_stale_scratch()
        loop = asyncio.new_event_loop()
        self._thread = Thread(target=loop.run_forever, name="insitu-episodes", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._enter(), loop).result()
        return loop

    async def _enter(self) -> None:
        pool = await self._stack.enter_async_context(self._pool)
        self._judge = make_judge(self.config, pool, self.tasks)
        self._stack.push_async_callback(self._judge.close)
