"""Build the sandbox pool from [sandbox], and check what its backends cannot run.

    backend, fallback -> Pool (limit, retries, circuit breakers) -> agents' and grading sandboxes

What a backend does not support is rejected before anything starts, for the fallback as well: it must be able
to take over any sandbox.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from insitu import registry
from insitu.config import Config
from insitu.errors import ConfigError, SetupError, user_code
from insitu.grading.runners.find import runner_named
from insitu.sandbox.base import Capability, SandboxBackend
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.docker_image import PULL_S
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import DEFAULT_MAX_SANDBOXES, Pool, PoolOptions
from insitu.sandbox.rootfs import root_trouble, search_path
from insitu.storage.temp_dirs import cache_folder
from insitu.tasks.commands import FIND, programs_of
from insitu.types import Oracle, Setup, Task

log = logging.getLogger(__name__)

WORK_BYTES = 128 << 20
NO_AGENT = "single_turn"
"""The harness that opens no sandbox."""
UNSUPPORTED: Mapping[str, Mapping[Capability, str]] = {
    "local": {
        "images": "it cannot run images",
        "root_setup": "its sandboxes share this machine's system",
        "container": "it starts no containers",
    },
    "docker": {},
    "harbor": {
        "binds": "it cannot mount folders of this machine",
        "root_setup": "it runs no commands as root before the agent",
        "roots": "it reads only the work folder",
        "container": "it starts the image alone",
    },
}
"""Capabilities that a kind of backend never has, with the reason for the user."""


def make_pool(config: Config, say: Callable[[str], None] = log.warning) -> Pool:
    """Return the pool that all sandboxes of a run come from; raise SetupError if no backend works.

    `say` gets a line when a backend goes down or recovers, and when the preferred one is unavailable.
    """
    table = config.sandbox
    backends: list[SandboxBackend] = []
    failures: list[str] = []
    for kind in table.kinds:
        try:
            backends.append(make_backend(config, kind))
        except SetupError as error:
            failures.append(f"{kind}: {error}")
    if not backends:
        raise SetupError("; ".join(failures) if table.fallback else failures[0].partition(": ")[2])
    for reason in failures:
        say(f"backend unavailable: {reason}; sandboxes come from {backends[0].name} for the whole run")
    fetch_s = PULL_S if {"docker", "harbor"} & {*table.kinds} else 0.0
    options = PoolOptions(
        max_sandboxes=table.max_sandboxes or max(DEFAULT_MAX_SANDBOXES, config.sandboxes_needed),
        in_order=True,
        boot_timeout_s=PoolOptions().boot_timeout_s + fetch_s,
    )
    return Pool(backends, options, say)


def make_backend(config: Config, kind: str = "", *, work_bytes: int = WORK_BYTES) -> SandboxBackend:
    """Return a backend, by default the preferred kind; raise SetupError if it cannot run here.

    `work_bytes`: maximum size of a work folder in memory, for the built-in kinds.
    """
    kind = kind or config.sandbox.backend
    found = registry.find("sandboxes", kind)
    if kind in registry.shipped("sandboxes"):
        return cast("SandboxBackend", found(config, work_bytes))
    with user_code(SetupError, f"sandbox.backend {kind}"):
        made = found if isinstance(found, SandboxBackend) and not isinstance(found, type) else found(config)
    if not isinstance(made, SandboxBackend):
        raise ConfigError(f"sandbox.backend: {kind} is not a SandboxBackend or a function returning one")
    return made


def local_backend(config: Config, work_bytes: int) -> LocalBackend:
    """Return sandboxes in namespaces of this machine; raise SetupError."""
    table = config.sandbox
    local = LocalBackend(work_bytes=work_bytes, memory_bytes=table.memory_mb << 20)
    if local.cgroups is None and table.memory_mb != type(table).model_fields["memory_mb"].default:
        raise SetupError(f"sandbox.memory_mb needs control groups; here: {local.why_no_cgroups}")
    return local


def docker_backend(config: Config, work_bytes: int) -> DockerBackend:
    """Return sandboxes in containers; raise SetupError."""
    table = config.sandbox
    return DockerBackend(
        table.image,
        cache=cache_folder(),
        program=table.program,
        runtime=table.runtime,
        user=table.user,
        memory_bytes=table.memory_mb << 20,
        disk_bytes=table.disk_mb << 20,
        work_bytes=work_bytes,
    )


def agents_call_by_url(config: Config) -> bool:
    """Return whether the agent of an arm may get sandboxes that reach no socket of this machine."""
    return "harbor" in config.sandbox.kinds and config.harness.agent != NO_AGENT


def check_agents(config: Config) -> None:
    """Raise ConfigError for an agent without a way to the gateway in the sandboxes of every backend."""
    needed = agents_call_by_url(config)
    if needed or config.gateway.public_url:
        registry.find("parts", "check_public_url")(config, needed=needed)


def check_network(config: Config, backend: SandboxBackend, say: Callable[[str], None]) -> None:
    """Raise SetupError for agents that the backend cannot keep to the gateway; a line if egress is open."""
    if "gateway_only" in backend.capabilities:
        return
    if config.sandbox.egress == "open":
        say(f"agents in sandboxes of {backend.name} can reach the Internet (sandbox.egress)")
        return
    raise SetupError(
        f"no agent runs in sandboxes of {backend.name}: they cannot be kept from the Internet while they call"
        ' the gateway (sandbox.egress = "open" allows it)'
    )


def check_tasks(config: Config, tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a task that could not run in the sandboxes of every backend."""
    lacks = {kind: UNSUPPORTED.get(kind, {}) for kind in config.sandbox.kinds}
    for task in tasks:
        if task.grading.where == "live" and config.harness.agent == NO_AGENT:
            raise ConfigError(f"task {task.id} is graded in the agent's own sandbox, and {NO_AGENT} has none")
        if task.steps and config.harness.agent == NO_AGENT:
            raise ConfigError(f"task {task.id} has several steps, and {NO_AGENT} is asked once")
        if task.steps and (rows := config.train.rows) != "all":
            raise ConfigError(f"task {task.id} has several steps, and train.rows = {rows} trains the last")
        runner = runner_named(task.grading.runner)
        for kind, words in lacks.items():
            if lacking := _lacking(task.setup, words):
                what, why = lacking
            elif kind == "local" and (trouble := root_trouble(task.setup.roots, task.setup.workdir)):
                what, why = "of its roots", trouble
            elif "binds" in words and runner is not None and runner.needs():
                what, why = f"runner {runner.name} mounts a folder in its sandboxes", words["binds"]
            elif kind in ("docker", "harbor") and not task.setup.image and not config.sandbox.image:
                what, why = "it has no image", "sandbox.image names none"
            else:
                continue
            raise ConfigError(
                f"task {task.id} cannot run with {_key(config, kind)} = {kind}: {what}, and {why}"
            )


def _lacking(setup: Setup, words: Mapping[Capability, str]) -> tuple[str, str] | None:
    """Return what a task asks for that the backend of `words` never has, and why."""
    asked: tuple[tuple[Capability, object, str], ...] = (
        ("images", setup.image, f"its image is {setup.image}"),
        ("root_setup", setup.root_commands, "it has root_commands"),
        ("roots", setup.roots, f"its result is in {', '.join(setup.roots)}"),
        ("container", setup.container, "it has services or variables"),
    )
    return next(((what, words[name]) for name, given, what in asked if given and name in words), None)


def check_programs(config: Config, task: Task, oracle: Oracle) -> None:
    """Raise ConfigError if checks of a task call a program that local sandboxes lack.

    Not of an image, of setup commands or of another machine: there the grader finds it missing.
    """
    names = programs_of(oracle)
    elsewhere = task.setup.image or task.setup.commands or config.fleet.kind != "none"
    if not names or elsewhere or "local" not in config.sandbox.kinds:
        return
    if missing := _missing(names):
        raise ConfigError(
            f"task {task.id} cannot run with {_key(config, 'local')} = local: its checks call {missing[0]},"
            " which is not installed for all users of this machine"
        )


@functools.cache
def _missing(names: tuple[str, ...]) -> list[str]:
    """Return those of `names` that no local sandbox has as a program."""
    command = ["sh", "-c", FIND, "sh", *names]
    path = {"PATH": search_path()}
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split()


def _key(config: Config, kind: str) -> str:
    return "sandbox.backend" if kind == config.sandbox.backend else "sandbox.fallback"
