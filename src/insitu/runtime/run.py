"""The composition root: gateway, sandboxes, agents and grader of a run, put together from its configuration.

    engine or provider -> gateway <-unix sockets- workers -> harness, sandboxes -> grader

Used by training, rollouts, demonstrations and baselines; `insitu serve` uses `open_backend` alone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from insitu.agents.base import Harness, model_name
from insitu.agents.pool import Sockets, WorkerPool
from insitu.attempt import AttemptExecutor
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config
from insitu.engines.base import Engine
from insitu.gateway.backend import SessionBackend
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.judge import TaskJudge
from insitu.grading.reward import reward_function
from insitu.runtime.agents import AgentSetup, find_agent_setup
from insitu.runtime.engine import Sampler, open_sampler
from insitu.runtime.gateway import gateway_config
from insitu.runtime.transcripts import transcript_reader
from insitu.runtime.upstream import open_upstream
from insitu.sandbox.base import SandboxBackend
from insitu.storage.artifacts import AgentArtifacts
from insitu.storage.host_calls import HostCallLog
from insitu.storage.logs import AgentLogs
from insitu.storage.run_dir import SESSIONS, RunDir
from insitu.storage.temp_dirs import scratch_folder
from insitu.tasks.base import TaskSource

log = logging.getLogger(__name__)
OpenSampler = Callable[..., AbstractAsyncContextManager[Sampler]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedBackend:
    """An engine or a provider behind the gateway's sessions."""

    backend: SessionBackend
    check: Callable[[], Awaitable[None]]
    """Raises when no further call can succeed."""
    engine: Engine | None
    """None for a provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Running parts that all kinds of runs share."""

    config: Config
    gateway: Gateway
    workers: WorkerPool
    harness: Harness
    sandboxes: SandboxBackend
    judge: TaskJudge

    def attempts(self, run: RunDir) -> AttemptExecutor:
        """Return the executor of attempts, which keeps logs, artifacts and host calls in the run."""
        return AttemptExecutor(
            self.gateway,
            self.workers,
            self.judge,
            keep_log=AgentLogs(run.logs).keep,
            keep_artifacts=AgentArtifacts(run.artifacts).keep,
            keep_calls=HostCallLog(run.host_calls).keep,
            model=model_name(self.config),
        )


def make_judge(
    config: Config, sandboxes: SandboxBackend, source: TaskSource, *, cached: bool = True
) -> TaskJudge:
    """Return the grading side, which the caller closes; `cached`: identical trees are graded once."""
    options = GradeConfig(timeout_s=config.grade.timeout_s, parallel=config.grade.workers)
    if not cached:
        options = replace(options, remember=0)
    reward = reward_function(config, transcript_reader(config))
    return TaskJudge(Grader(sandboxes, options), source, config.grade.min_trust, reward)


@asynccontextmanager
async def open_backend(
    run: RunDir,
    renderer: ChatRenderer | None,
    say: Callable[[str], None],
    sampler: OpenSampler = open_sampler,
) -> AsyncIterator[_OpenedBackend]:
    """Open the configured engine, or the provider if there is no renderer.

    `say` gets lines for the user. Raises ConfigError, EngineError, EngineUnavailable.
    """
    config = run.config
    if renderer is None:
        async with open_upstream(config, run.path / SESSIONS) as provider:
            yield _OpenedBackend(backend=provider, check=provider.check, engine=None)
        return
    async with sampler(config, renderer, run.logs / "learner.log", say) as opened:
        backend = TokenBackend(opened.engine, renderer)
        yield _OpenedBackend(backend=backend, check=opened.check, engine=opened.engine)


@asynccontextmanager
async def open_runtime(
    config: Config,
    backend: SessionBackend,
    source: TaskSource,
    setup: AgentSetup | None = None,
    say: Callable[[str], None] = log.warning,
) -> AsyncIterator[Runtime]:
    """Run gateway, sandboxes, workers and grader inside the context.

    `setup`: from `find_agent_setup`. `say` gets the gateway's lines for the user.
    """
    setup = setup or find_agent_setup(config)
    harness, size = setup.harness, config.harness.workers
    async with AsyncExitStack() as stack:
        # Unix socket paths are limited to 107 bytes, a run directory may be deep.
        folder = stack.enter_context(scratch_folder())
        gateway = await stack.enter_async_context(Gateway(backend, gateway_config(config), log_line=say))
        sandboxes = await stack.enter_async_context(setup.pool)
        paths = [folder / f"g{i}" for i in range(size)]
        for path in paths:
            await stack.enter_async_context(gateway.listen_unix(path))
        if config.gateway.port:
            await stack.enter_async_context(gateway.listen_tcp(port=config.gateway.port))
        strict = config.harness.mode == "fresh"
        workers = await stack.enter_async_context(WorkerPool(harness, size, Sockets(paths), strict=strict))
        if not strict:
            await workers.warm()
        judge = make_judge(config, sandboxes, source)
        stack.push_async_callback(judge.close)
        yield Runtime(
            config=config, gateway=gateway, workers=workers, harness=harness, sandboxes=sandboxes, judge=judge
        )
