"""Sandboxes and the agent of a run, from the configuration and checked on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from insitu.agents.artifacts import artifacts_from_config
from insitu.agents.base import Harness, ModelAccess, model_name
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import install
from insitu.agents.recipe import resolve_agent
from insitu.agents.single_turn import SingleTurn
from insitu.config import Config
from insitu.gateway.listeners import check_port
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
