"""Build the agent side of a run from the configuration.

    backend -> harness -> workers <-unix sockets-> gateway -> renderer, engine

The same for a learner's engine and for a scripted one, which records demonstrations.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.agents.artifacts import artifacts_from_config
from insitu.agents.base import Harness, ModelAccess, model_name
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import install
from insitu.agents.pool import Sockets, WorkerPool
from insitu.agents.recipe import resolve_agent
from insitu.agents.single_turn import SingleTurn
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config
from insitu.engines.base import Engine
from insitu.gateway.listeners import check_port
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.runtime.gateway import gateway_config
from insitu.runtime.sandboxes import make_pool
from insitu.sandbox.base import SandboxBackend
from insitu.sandbox.pool import Pool
from insitu.tasks.factory import action_of
from insitu.types import Limits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetup:
    """Sandbox pool and harness, checked on this machine before anything slow is started."""

    pool: Pool
    """Not yet entered."""
    harness: Harness


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkers:
    """Workers whose sandboxes reach one gateway."""

    workers: WorkerPool
    harness: Harness
    backend: SandboxBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRuntime:
    """Gateway and workers of a run."""

    gateway: Gateway
    workers: WorkerPool
    harness: Harness
    backend: SandboxBackend


def limits_of(config: Config) -> Limits:
    return config.limits.pick(Limits, max_context_tokens=config.model.max_context_tokens)


def make_harness(
    config: Config, backend: SandboxBackend, log_line: Callable[[str], None] = log.info
) -> Harness:
    """Return the configured agent, installed if missing; `log_line` gets a line before an installation.

    Raises SetupError, and ConfigError for an extension that is not an agent.
    """
    if config.harness.agent == "single_turn":
        return SingleTurn(action_of(config))
    recipe = resolve_agent(config.harness)
    access = ModelAccess(
        public_id="",
        secret="",
        model=model_name(config),
        max_call_tokens=config.limits.max_call_tokens,
        max_context_tokens=config.model.max_context_tokens,
    )
    return RecipeHarness(
        recipe,
        backend,
        installed=install(recipe, log_line),
        uses=config.harness.max_rollouts_per_process if config.harness.mode == "warm" else 1,
        access=access,
        compact=config.harness.compact,
        artifacts=artifacts_from_config(config),
    )


def find_agent_setup(config: Config, log_line: Callable[[str], None] = log.warning) -> AgentSetup:
    """Return sandboxes and agent; install the agent if missing and check the port.

    `log_line`: see make_pool. Raises SetupError, and ConfigError for invalid host tools.
    """
    pool = find_pool(config, log_line, lambda check, *args: check(*args))
    return AgentSetup(pool=pool, harness=make_harness(config, pool, log_line))


def find_pool(config: Config, log_line: Callable[[str], None], run: Callable[..., Any]) -> Pool:
    """Return the sandbox pool after checking port and host tools; each check is called through `run`."""
    run(check_port, config.gateway.port)
    run(gateway_config, config)
    pool: Pool = run(make_pool, config, log_line)
    return pool


@asynccontextmanager
async def open_agents(
    config: Config,
    renderer: ChatRenderer,
    engine: Engine,
    sockets: Path,
    setup: AgentSetup | None = None,
    log_line: Callable[[str], None] = log.warning,
) -> AsyncIterator[AgentRuntime]:
    """Run gateway, workers and their sockets inside the context.

    `setup`: from `find_agent_setup`. `log_line` gets the gateway's lines for the operator.
    """
    async with (
        Gateway(TokenBackend(engine, renderer), gateway_config(config), log_line=log_line) as gateway,
        open_workers(config, gateway, sockets, setup) as crew,
    ):
        yield AgentRuntime(gateway=gateway, workers=crew.workers, harness=crew.harness, backend=crew.backend)


@asynccontextmanager
async def open_workers(
    config: Config, gateway: Gateway, sockets: Path, setup: AgentSetup | None = None
) -> AsyncIterator[AgentWorkers]:
    """Run the workers of an existing gateway, each with its own socket below `sockets`."""
    setup = setup or find_agent_setup(config)
    harness, size = setup.harness, config.harness.workers
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(setup.pool)
        paths = [sockets / f"g{i}" for i in range(size)]
        for path in paths:
            await stack.enter_async_context(gateway.listen_unix(path))
        if config.gateway.port:
            await stack.enter_async_context(gateway.listen_tcp(port=config.gateway.port))
        strict = config.harness.mode == "fresh"
        workers = await stack.enter_async_context(WorkerPool(harness, size, Sockets(paths), strict=strict))
        if not strict:
            await workers.warm()
        yield AgentWorkers(workers=workers, harness=harness, backend=backend)
