"""Where sandboxes come from: the pool over the backends that [sandbox] names, and what they cannot hold.

    backend, fallback -> Pool (permits, tries, circuits) -> agents' and grading sandboxes

What no sandbox of a backend could hold is refused before anything starts, for the fall-back as well: it has
to take over whatever comes. Called by each verb that opens sandboxes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from insitu.config import Config, SandboxKind
from insitu.errors import ConfigError, SetupError
from insitu.grading.grader import RUNNERS
from insitu.sandbox.base import Capability, SandboxBackend
from insitu.sandbox.circuit_breaker import CircuitOptions
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.harbor import HarborBackend
from insitu.sandbox.harbor_sdk import Factory
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool, PoolOptions
from insitu.storage.temp_dirs import cache_folder
from insitu.tasks.base import TaskSource
from insitu.tasks.dataset import RowSource
from insitu.tasks.user_functions import load_function
from insitu.types import Task

log = logging.getLogger(__name__)

PERMITS = 128
WORK_BYTES = 128 << 20
NO_AGENT = "single_turn"
"""The harness that opens no sandbox."""
LACKS: Mapping[SandboxKind, Mapping[Capability, str]] = {
    "local": {
        "images": "it makes no sandboxes of images",
        "root_setup": "the system of its sandboxes is this machine's own",
    },
    "docker": {},
    "harbor": {
        "gateway_only": "its sandboxes do not reach the gateway",
        "binds": "it shows its sandboxes no folder of this machine",
        "root_setup": "nothing there runs as root before the agent",
    },
}
"""What a kind of backend never has, in words for a person."""


def make_pool(config: Config, say: Callable[[str], None] = log.warning) -> Pool:
    """Where every sandbox of a run comes from; `say` gets a line when a backend goes down or is back, and
    when there is none of the one that is preferred. Raises SetupError."""
    table = config.sandbox
    made: list[SandboxBackend] = []
    why: list[str] = []
    for kind in table.kinds:
        try:
            made.append(make_backend(config, kind))
        except SetupError as error:
            why.append(f"{kind}: {error}")
    if not made:
        raise SetupError("; ".join(why) if table.fallback else why[0].partition(": ")[2])
    for reason in why:
        say(f"no sandbox {reason}; sandboxes come from {made[0].name} for the whole run")
    fetch_s = table.pull_timeout_s if {"docker", "harbor"} & {*table.kinds} else 0.0
    options = PoolOptions(
        max_sandboxes=table.max_sandboxes or max(PERMITS, config.sandboxes_needed),
        warm=table.warm,
        in_order=True,
        boot_attempts=table.boot_attempts,
        boot_timeout_s=table.boot_timeout_s + fetch_s,
        circuit=CircuitOptions(
            threshold=table.breaker_failures,
            window_s=table.breaker_window_s,
            cooldown_s=table.breaker_cooldown_s,
        ),
    )
    return Pool(made, options, say)


def make_backend(
    config: Config, kind: SandboxKind | None = None, *, work_bytes: int = WORK_BYTES
) -> SandboxBackend:
    """What sandboxes are made with, by default the preferred kind. `work_bytes`: most that a work folder in
    memory may hold. Raises SetupError when this machine cannot."""
    table = config.sandbox
    kind = kind or table.backend
    if kind == "local":
        local = LocalBackend(table.mode, work_bytes=work_bytes, memory_bytes=table.memory_mb << 20)
        if local.cgroups is None and table.memory_mb != type(table).model_fields["memory_mb"].default:
            raise SetupError(f"sandbox.memory_mb needs control groups; here: {local.why_no_cgroups}")
        return local
    if kind == "harbor":
        return HarborBackend(table.environment, image=table.image, make=_factory(table.environment))
    return DockerBackend(
        table.image,
        cache=cache_folder(),
        program=table.program,
        runtime=table.runtime,
        user=table.user,
        memory_bytes=table.memory_mb << 20,
        disk_bytes=table.disk_mb << 20,
        pull_timeout_s=table.pull_timeout_s,
        work_bytes=work_bytes,
    )


def _factory(environment: str) -> Factory | None:
    """A function of the user's own that makes environments; None for the name of one of Harbor's."""
    found: Any = load_function(environment) if ":" in environment else None
    return cast("Factory | None", found)


def check_agents(config: Config) -> None:
    """Raises ConfigError for an agent that could not run in every backend's sandboxes."""
    if config.harness.agent == NO_AGENT:
        return
    for kind in config.sandbox.kinds:
        if why := LACKS[kind].get("gateway_only"):
            raise ConfigError(
                f"no agent runs in sandboxes of {_key(config, kind)} = {kind}: {why};"
                f" harness.agent = {NO_AGENT}, `insitu grade` and `insitu tasks validate` open sandboxes for"
                " grading alone"
            )


def check_tasks(config: Config, tasks: Iterable[Task]) -> None:
    """Raises ConfigError for a task that could not run in every backend's sandboxes."""
    lacks = {kind: LACKS[kind] for kind in config.sandbox.kinds}
    for task in tasks:
        runner = RUNNERS.get(task.grading.runner)
        for kind, words in lacks.items():
            if task.setup.image and "images" in words:
                what, why = f"its image is {task.setup.image}", words["images"]
            elif task.setup.root_commands and "root_setup" in words:
                what, why = "root sets it up", words["root_setup"]
            elif "binds" in words and runner is not None and runner.needs():
                what, why = f"runner {runner.name} shows its sandboxes a folder", words["binds"]
            elif kind != "local" and not task.setup.image and not config.sandbox.image:
                what, why = "it is made of no image", "sandbox.image names none"
            else:
                continue
            raise ConfigError(
                f"task {task.id} has no place in {_key(config, kind)} = {kind}: {what}, and {why}"
            )


def examples_of(source: TaskSource) -> Iterable[Task]:
    """Tasks of a source that stand for all the others of it in what they need of a sandbox."""
    return source.examples() if isinstance(source, RowSource) else source.tasks("train", 0, 1)


def _key(config: Config, kind: SandboxKind) -> str:
    return "sandbox.backend" if kind == config.sandbox.backend else "sandbox.fallback"
