"""Sandboxes and the agent of a run, from the configuration and checked on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from insitu.agents.artifacts import artifacts_from_config
from insitu.agents.base import Harness, ModelAccess, model_name
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import install
from insitu.agents.recipe import resolve_agent
from insitu.agents.single_turn import SingleTurn
from insitu.config import Arm, Config, SandboxTable
from insitu.errors import ConfigError
from insitu.gateway.listeners import check_port
from insitu.runtime.gateway import gateway_config
from insitu.runtime.sandboxes import NO_AGENT, check_network, make_pool
from insitu.sandbox.base import SandboxBackend
from insitu.sandbox.pool import Pool
from insitu.tasks.factory import action_of
from insitu.types import Limits, arm_of

log = logging.getLogger(__name__)

USES = 64
"""Rollouts of a warm sandbox, after which a new one costs nothing that shows: it ends what agents leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetup:
    """Sandbox pool and harness, checked on this machine before anything slow is started."""

    config: Config
    """Configuration that they were made from."""
    pool: Pool
    """Not yet entered."""
    harness: Harness


def limits_of(config: Config) -> Limits:
    # A call adds two nodes at most: no budget of calls that was asked for ends earlier for its forest.
    nodes = max(Limits().max_nodes, 2 * config.limits.max_calls)
    return config.limits.pick(Limits, max_context_tokens=config.model.max_context_tokens, max_nodes=nodes)


def make_harness(
    config: Config, backend: SandboxBackend, log_line: Callable[[str], None] = log.info
) -> Harness:
    """Return the configured agent, installed if missing; `log_line` gets a line before an installation.

    Raises SetupError, and ConfigError for an extension that is not an agent.
    """
    if config.harness.agent == NO_AGENT:
        return SingleTurn(action_of(config))
    recipe = resolve_agent(config.harness)
    if config.harness.compact > 1 and not recipe.compacts:
        raise ConfigError(f"harness.compact has no effect: nothing of {recipe.name} says where it compacts")
    if config.harness.is_command:  # nothing is known of it: a process may take what its sandbox has
        recipe = replace(recipe, process_memory_bytes=config.sandbox.memory_mb << 20)
    check_network(config, backend, log_line)
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
        uses=USES if config.harness.mode == "warm" else 1,
        access=access,
        compact=config.harness.compact,
        artifacts=artifacts_from_config(config),
    )


def check_listener(config: Config) -> None:
    """Raise SetupError if the gateway's port is taken."""
    check_port("gateway.listen", *config.gateway.address)


def find_pools(
    arms: Mapping[str, Arm], log_line: Callable[[str], None], run: Callable[..., Any]
) -> Mapping[str, Pool]:
    """Return the sandbox pool of each arm of a run; arms with equal [sandbox] share one.

    Each pool is made through `run`, which returns None if that failed.
    """
    pools: list[tuple[SandboxTable, Pool]] = []
    found: dict[str, Pool] = {}
    for name, arm in arms.items():
        own = arm.config.sandbox
        pool = next((pool for table, pool in pools if table == own), None)
        if pool is None:
            pool = run(make_pool, arm.config, log_line)
            pools.append((own, pool))
        found[name] = pool
    return found


def make_setups(
    arms: Mapping[str, Arm], pools: Mapping[str, Pool], log_line: Callable[[str], None] = log.warning
) -> Mapping[str, AgentSetup]:
    """Return pool and agent of each arm of a run; agents that are missing are installed.

    Arms that differ in nothing that an agent uses share one. Raises SetupError, ConfigError.
    """
    made: list[AgentSetup] = []
    found: dict[str, AgentSetup] = {}
    for name, arm in arms.items():
        setup = next((one for one in made if _same_agent(one.config, arm.config)), None)
        if setup is None:
            harness = make_harness(arm.config, pools[name], log_line)
            setup = AgentSetup(config=arm.config, pool=pools[name], harness=harness)
            made.append(setup)
        found[name] = setup
    return found


def agents_of(setups: Mapping[str, AgentSetup]) -> tuple[str, str]:
    """Return names and versions of the agents of the task sets, each once."""
    harnesses = [setup.harness for part, setup in setups.items() if not arm_of(part).evaluation]
    used = dict.fromkeys((harness.name, harness.version) for harness in harnesses)
    return " + ".join(name for name, _ in used), " + ".join(version for _, version in used)


def _same_agent(a: Config, b: Config) -> bool:
    if a.harness.agent == NO_AGENT and a.task_set.parse_answer != b.task_set.parse_answer:
        return False
    return (a.harness, a.sandbox, a.limits) == (b.harness, b.sandbox, b.limits)


def find_setups(
    arms: Mapping[str, Arm], log_line: Callable[[str], None] = log.warning
) -> Mapping[str, AgentSetup]:
    """Return sandboxes and agent of each arm of a run, and check the gateway.

    `log_line`: see make_pool. Raises SetupError, and ConfigError for invalid host tools.
    """
    first = next(iter(arms.values())).config
    check_listener(first)
    gateway_config(first)
    return make_setups(arms, find_pools(arms, log_line, lambda check, *args: check(*args)), log_line)
