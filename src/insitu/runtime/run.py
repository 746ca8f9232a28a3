"""The composition root: gateway, sandboxes, agents and grader of a run, put together from its configuration.

    engine or provider -> gateway <-unix sockets- workers -> harness, sandboxes -> grader

With [fleet] all of it but the engine is on nodes. Used by training, rollouts, demonstrations and baselines;
`insitu serve` uses `open_backend` alone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from insitu.agents.base import Harness, model_name
from insitu.agents.pool import Sockets, WorkerPool
from insitu.attempt import (
    AttemptExecutor,
    AttemptSpec,
    Ending,
    KeepArtifacts,
    KeepCalls,
    KeepLog,
    OnStart,
    ignore_cancelled,
    ignore_start,
    no_wait,
)
from insitu.chat.message_text import MessageText
from insitu.chat.renderer import ChatRenderer
from insitu.config import Arm, Config
from insitu.engines.base import Engine
from insitu.errors import ConfigError
from insitu.gateway.backend import SessionBackend
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.judge import TaskJudge
from insitu.grading.reward import reward_function
from insitu.registry import find
from insitu.runtime.agents import AgentSetup, agents_of, find_setups
from insitu.runtime.engine import Sampler, open_sampler
from insitu.runtime.gateway import gateway_config, public_url
from insitu.runtime.running import RunningAgents
from insitu.runtime.sandboxes import agents_call_by_url
from insitu.runtime.transcripts import transcript_reader
from insitu.sandbox.base import SandboxBackend
from insitu.storage.artifacts import AgentArtifacts
from insitu.storage.host_calls import HostCallLog
from insitu.storage.logs import AgentLogs
from insitu.storage.run_dir import SESSIONS, RunDir
from insitu.storage.temp_dirs import scratch_folder
from insitu.tasks.base import TaskSource
from insitu.types import Rollout, Task

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
    setups: Mapping[str, AgentSetup]
    """Sandboxes and agent by arm (`Task.part`), the first task set first."""
    judges: Mapping[str, TaskJudge]
    """Grading side by arm."""
    ending: Ending

    @property
    def harness(self) -> Harness:
        """The agent of the first task set."""
        return next(iter(self.setups.values())).harness

    @property
    def judge(self) -> TaskJudge:
        """The grading side of the first task set."""
        return next(iter(self.judges.values()))

    @property
    def agents(self) -> tuple[str, str]:
        """Names and versions of the agents."""
        return agents_of(self.setups)

    def open_sessions(self) -> Sequence[Session]:
        """Return the sessions of the agents at work."""
        return self.gateway.open_sessions()

    def gauges(self) -> Mapping[str, int]:
        """Return further figures for the timeline: of what reward functions share."""
        return {name: count for judge in self.judges.values() for name, count in judge.gauges().items()}

    def attempts(self, run: RunDir) -> AttemptsByArm:
        """Return the executor of attempts, which keeps logs, artifacts and host calls in the run."""
        return self.executor(
            AgentLogs(run.logs).keep, AgentArtifacts(run.artifacts).keep, HostCallLog(run.host_calls).keep
        )

    def executor(
        self, keep_log: KeepLog, keep_artifacts: KeepArtifacts, keep_calls: KeepCalls
    ) -> AttemptsByArm:
        """Return an executor of attempts that passes on what else they leave."""
        return AttemptsByArm(
            {
                part: AttemptExecutor(
                    self.gateway,
                    self.workers,
                    self.judges[part],
                    keep_log=keep_log,
                    keep_artifacts=keep_artifacts,
                    keep_calls=keep_calls,
                    ending=self.ending,
                    model=model_name(self.config),
                    harness=setup.harness,
                )
                for part, setup in self.setups.items()
            }
        )


class AttemptsByArm:
    """Implements collect.options.AttemptRunner: each attempt by the executor of its task's arm."""

    def __init__(self, executors: Mapping[str, AttemptExecutor]) -> None:
        self._executors = executors

    async def run(
        self,
        spec: AttemptSpec,
        on_start: OnStart = ignore_start,
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        """See AttemptExecutor.run."""
        return await self._executors[spec.task.part].run(spec, on_start, on_cancelled, ready)

    @property
    def scores_groups(self) -> bool:
        """Whether rewards of an arm need the whole group."""
        return any(executor.scores_groups for executor in self._executors.values())

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """See AttemptExecutor.score_group."""
        return await self._executors[task.part].score_group(task, rollouts)


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
        async with find("engines", "upstream")(config, run.path / SESSIONS) as provider:
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
    setups: Mapping[str, AgentSetup] | None = None,
    say: Callable[[str], None] = log.warning,
) -> AsyncIterator[Runtime]:
    """Run gateway, sandboxes, workers and graders inside the context.

    `setups`: from `find_setups`. `say` gets the gateway's lines for the user.
    """
    setups = setups or find_setups(config.arms)
    harness, size = next(iter(setups.values())).harness, config.harness.workers
    async with AsyncExitStack() as stack:
        # Unix socket paths are limited to 107 bytes, a run directory may be deep.
        folder = stack.enter_context(scratch_folder())
        gateway = await stack.enter_async_context(Gateway(backend, gateway_config(config), log_line=say))
        for pool in dict.fromkeys(setup.pool for setup in setups.values()):
            await stack.enter_async_context(pool)
        paths = [folder / f"g{i}" for i in range(size)]
        for path in paths:
            await stack.enter_async_context(gateway.listen_unix(path))
        url = ""
        if config.gateway.listen:
            tcp = await stack.enter_async_context(gateway.listen_tcp(*config.gateway.address))
            needed = any(agents_call_by_url(arm.config) for arm in config.arms.values())
            public = public_url(config, gateway, tcp.origin, say, needed=needed)
            url = await stack.enter_async_context(public)
        strict = config.harness.mode == "fresh"
        workers = await stack.enter_async_context(
            WorkerPool(harness, size, Sockets(paths), strict=strict, gateway_url=url)
        )
        if not strict:
            await workers.warm()
        judges = make_judges(config.arms, {part: setup.pool for part, setup in setups.items()}, source)
        for judge in dict.fromkeys(judges.values()):
            stack.push_async_callback(judge.close)
        yield Runtime(
            config=config,
            gateway=gateway,
            workers=workers,
            setups=setups,
            judges=judges,
            ending=_ending_of(backend),
        )


def _ending_of(backend: SessionBackend) -> Ending:
    return MessageText(backend.renderer).ending if isinstance(backend, TokenBackend) else lambda turns: ""


@asynccontextmanager
async def open_agents(
    config: Config,
    backend: SessionBackend,
    engine: Engine | None,
    source: TaskSource,
    setups: Mapping[str, AgentSetup],
    say: Callable[[str], None] = log.warning,
) -> AsyncIterator[RunningAgents]:
    """Run what makes rollouts inside the context: here, or on the nodes of [fleet], which call `engine`."""
    if config.fleet.kind == "none":
        async with open_runtime(config, backend, source, setups, say) as runtime:
            yield runtime
    elif engine is None:
        raise ConfigError("fleet.kind needs an engine: a provider's calls cannot go through the controller")
    else:
        nodes = find("fleets", config.fleet.kind)
        async with nodes.open(config, engine, source, agents_of(setups), say) as fleet:
            yield fleet


def make_judges(
    arms: Mapping[str, Arm],
    pools: Mapping[str, SandboxBackend],
    source: TaskSource,
    *,
    cached: bool = True,
) -> Mapping[str, TaskJudge]:
    """Return the grading side of each arm, which the caller closes; arms graded alike share one.

    `cached`: identical trees are graded once.
    """
    made: list[tuple[Config, TaskJudge]] = []
    found: dict[str, TaskJudge] = {}
    for part, arm in arms.items():
        config = arm.config
        how = (config.sandbox, config.grade, config.reward)
        same = (judge for own, judge in made if (own.sandbox, own.grade, own.reward) == how)
        judge = next(same, None) or make_judge(config, pools[part], source, cached=cached)
        made.append((config, judge))
        found[part] = judge
    return found
