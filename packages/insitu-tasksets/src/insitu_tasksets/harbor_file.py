"""task.toml of Harbor: its keys, what of them a sandbox can do, and the plan of its containers."""

from __future__ import annotations

import functools
import logging
import math
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from insitu.errors import TaskError
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.row_files import TaskRow, Text
from insitu.tasks.shared import Seconds
from insitu_tasksets.compose import Compose, compose_file, deadline_of, megabytes, read_compose
from insitu_tasksets.container_plan import MAIN, ContainerPlan, Health, McpServer

log = logging.getLogger(__name__)


class _Healthcheck(TaskRow):
    command: Text
    interval_sec: Annotated[float, Field(ge=0)] = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0)] = 0.0
    retries: Annotated[int, Field(ge=1)] = 3


class _McpServer(TaskRow):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")]
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str = ""
    command: str = ""
    args: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport} needs {needed}")
        return self


NetworkMode = Literal["", "public", "no-network", "allowlist"]


class HarborEnvironment(TaskRow):
    """[environment] of task.toml."""

    docker_image: str = ""
    workdir: str = ""
    os: str = "linux"
    healthcheck: _Healthcheck | None = None
    env: dict[str, str] = Field(default_factory=dict)
    mcp_servers: list[_McpServer] = Field(default_factory=list)
    memory: str | int = ""
    memory_mb: Annotated[float, Field(ge=0)] = 0.0
    storage: str | int = ""
    storage_mb: Annotated[float, Field(ge=0)] = 0.0
    cpus: Annotated[float, Field(ge=0)] = 0.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    skills_dir: str = ""
    allow_internet: bool = False
    network_mode: NetworkMode = ""
    allowed_hosts: list[str] = Field(default_factory=list)


class HarborPhase(TaskRow):
    """[agent], [verifier] and [solution], of a task or of a step."""

    timeout_sec: Seconds | None = None
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment: HarborEnvironment | None = None
    """[verifier]: an image of its own for the tests."""
    environment_mode: Literal["", "shared", "separate"] = ""
    collect: list[Any] = Field(default_factory=list)
    """[verifier]: commands that save what only a running service shows."""
    network_mode: NetworkMode = ""
    allowed_hosts: list[str] = Field(default_factory=list)


class _Artifact(TaskRow):
    source: Text
    service: str | None = None
    exclude: list[str] = Field(default_factory=list)


class HarborStep(TaskRow):
    """[[steps]]."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,60}$")]
    agent: HarborPhase = HarborPhase()
    verifier: HarborPhase = HarborPhase()
    min_reward: float | dict[str, float] | None = None
    healthcheck: _Healthcheck | None = None
    artifacts: list[str | _Artifact] = Field(default_factory=list)


class HarborFile(TaskRow):
    """task.toml."""

    environment: HarborEnvironment = HarborEnvironment()
    agent: HarborPhase = HarborPhase()
    verifier: HarborPhase = HarborPhase()
    solution: HarborPhase = HarborPhase()
    steps: list[HarborStep] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    artifacts: list[str | _Artifact] = Field(default_factory=list)

    @property
    def separate(self) -> bool:
        """Whether the tests run apart from the agent's environment, on artifacts alone."""
        mode = self.verifier.environment_mode or ("separate" if self.verifier.environment else "shared")
        return mode == "separate"


def check_supported(parsed: HarborFile) -> None:
    """Raise TaskError for a task that Harbor would grade differently."""
    own, tests = parsed.environment, parsed.verifier
    for found, why in (
        (own.skills_dir, "environment.skills_dir is not supported: agents get no skills"),
        (own.os.lower() != "linux", f"environment.os is {own.os}: only Linux is supported"),
        (tests.collect, "verifier.collect is not supported"),
    ):
        if found:
            raise TaskError(why)
    for table, phase in (("agent", parsed.agent), ("verifier", tests)):
        if phase.user is not None:
            raise TaskError(f"{table}.user is not supported: all of a sandbox runs as sandbox.user")
    for table, asked in (("environment", own), ("agent", parsed.agent), ("verifier", tests)):
        if asked.allowed_hosts or asked.network_mode == "allowlist":
            raise TaskError(f"{table}.allowed_hosts is not supported: sandboxes have no network")
        if asked.network_mode == "public" or (asked is own and own.allow_internet):
            _say_no_network()


def step_file(parsed: HarborFile, step: HarborStep) -> HarborFile:
    """Return task.toml as one step has it, with the step's keys over those of the task. Raises TaskError."""
    own = parsed.model_copy(
        update={
            "agent": _over(parsed.agent, step.agent),
            "verifier": _over(parsed.verifier, step.verifier),
            "artifacts": [*parsed.artifacts, *step.artifacts],
        }
    )
    for found, key in (
        (step.healthcheck, "healthcheck"),
        (step.verifier.environment, "verifier.environment"),
    ):
        if found is not None:
            raise TaskError(f"steps.{step.name}.{key} is not supported")
    try:
        check_supported(own)
    except TaskError as error:
        raise TaskError(f"steps.{step.name}.{error}") from None
    return own


def _over(under: HarborPhase, phase: HarborPhase) -> HarborPhase:
    return under.model_copy(update={key: getattr(phase, key) for key in phase.model_fields_set})


def least_reward(step: HarborStep) -> float | None:
    """Return the reward below which a step ends the task, if any. Raises TaskError."""
    least = step.min_reward
    if isinstance(least, dict):
        if other := least.keys() - {"reward"}:
            raise TaskError(
                f"steps.{step.name}.min_reward: only `reward` is read, not {ascii(min(other))[:60]}"
            )
        least = least.get("reward")
    if least is not None and least > 1:
        raise TaskError(f"steps.{step.name}.min_reward is {least:g}, and no reward is more than 1")
    return least


def checked_resources(own: HarborEnvironment, options: LoadOptions) -> int:
    """Return the memory that a task wants, in MB; raise TaskError for more than a sandbox has."""
    memory = max(math.ceil(own.memory_mb), megabytes(own.memory, "environment.memory"))
    storage = max(math.ceil(own.storage_mb), megabytes(own.storage, "environment.storage"))
    for name, wanted, key, most in (
        ("memory", memory, "memory_mb", options.memory_mb),
        ("storage", storage, "disk_mb", options.disk_mb),
    ):
        if most and wanted > most:
            raise TaskError(
                f"environment.{name} is {wanted} MB, more than sandbox.{key} = {most}: raise that"
            )
    if own.gpus:
        raise TaskError(f"environment.gpus is {own.gpus:g}: sandboxes have no GPU")
    if own.cpus > (os.cpu_count() or 1):
        _say_cpus(own.cpus)
    return memory


@functools.cache
def _say_no_network() -> None:
    log.warning("tasks ask for a public network (network_mode, allow_internet): their sandboxes have none")


@functools.cache
def _say_cpus(cpus: float) -> None:
    log.warning("tasks want environment.cpus = %g: their sandboxes share %s", cpus, os.cpu_count())


_FROM_HOST = re.compile(r"\$\{([A-Za-z_]\w*)(?::-(.*))?\}")


def resolved(env: Mapping[str, str], table: str) -> dict[str, str]:
    """Return variables with their values; raise TaskError for one without a default.

    `${NAME:-default}` is the default: the host's environment does not enter a sandbox.
    """
    values = {}
    for key, value in env.items():
        found = _FROM_HOST.fullmatch(value)
        if not key.isidentifier():
            raise TaskError(f"{table}.env: {ascii(key)[:60]} is not a variable name")
        if found is not None and found[2] is None:
            raise TaskError(f"{table}.env.{key} reads {found[1]} from the host, which sandboxes cannot see")
        values[key] = value if found is None else found[2]
    return values


def container_plan(folder: Path, own: HarborEnvironment) -> tuple[ContainerPlan, str]:
    """Return the plan of a task's containers, and the image that its compose file names, or "".

    `folder`: environment/. Raises TaskError.
    """
    file = compose_file(folder)
    compose = read_compose(file, MAIN) if file is not None else Compose()
    health = own.healthcheck
    names = [server.name for server in own.mcp_servers]
    if "insitu" in names or len(set(names)) < len(names):
        raise TaskError("environment.mcp_servers: each needs a name of its own, other than insitu")
    plan = ContainerPlan(
        env=compose.env | resolved(own.env, "environment"),
        volumes=compose.volumes,
        services=compose.services,
        after=compose.after,
        health=None if health is None else _health(health),
        mcp_servers=tuple(_server(server) for server in own.mcp_servers),
    )
    return plan, compose.image


def _health(asked: _Healthcheck) -> Health:
    whole = asked.start_period_sec + asked.retries * (asked.interval_sec + asked.timeout_sec)
    argv = ("/bin/sh", "-c", asked.command)
    return Health(argv=argv, deadline_s=deadline_of(whole), timeout_s=asked.timeout_sec)


def _server(asked: _McpServer) -> McpServer:
    transport = "streamable-http" if asked.transport == "http" else asked.transport
    return McpServer(
        name=asked.name, transport=transport, url=asked.url, command=asked.command, args=tuple(asked.args)
    )


PUBLISHED = "/logs/artifacts"
"""Where agents may leave artifacts that task.toml does not name."""


def carried(parsed: HarborFile, workdir: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what separate tests get, as paths of a Tree, and the roots that this needs.

    Raises TaskError.
    """
    if not workdir:
        raise TaskError("a separate verifier needs environment.workdir, or a WORKDIR in the Dockerfile")
    paths: list[str] = []
    roots: list[str] = []
    for artifact in [*parsed.artifacts, PUBLISHED]:
        found = _Artifact(source=artifact) if isinstance(artifact, str) else artifact
        if found.exclude or found.service not in (None, MAIN):
            raise TaskError(f"artifacts: exclude and service of {ascii(found.source)[:80]} are not supported")
        path = posixpath.normpath(posixpath.join(workdir, found.source))
        if path == workdir or path.startswith(f"{workdir}/"):
            paths.append(posixpath.relpath(path, workdir))
            continue
        paths.append(path)
        head, name = posixpath.split(path)
        roots.append(head if "." in name else path)
    return tuple(paths), outermost(roots)


def outermost(roots: Sequence[str]) -> tuple[str, ...]:
    """Return the roots without those inside another one."""
    return tuple(root for root in dict.fromkeys(roots) if not any(root.startswith(f"{o}/") for o in roots))


def verifier_environment(folder: Path, parsed: HarborFile) -> HarborEnvironment | None:
    """Return the tests' own environment, None where they run in the task's. Raises TaskError."""
    own = parsed.verifier.environment
    if own is None or not parsed.separate:
        return None
    more = (own.healthcheck, own.mcp_servers, own.os.lower() != "linux", compose_file(folder / "tests"))
    if any(more):
        raise TaskError("verifier.environment: services, health checks and other systems are not supported")
    return own
