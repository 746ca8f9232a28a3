"""What a task's containers need beside the image, as the text of `Setup.container`.

It is part of a task's hash, so it holds no path of this machine: images, files and folders of the task are
named by their content (storage/image_builds.py).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

MAIN = "main"
"""Name of the agent's own container in the network of its task."""
Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]


class _Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Health(_Plan):
    """A command that exits with 0 once its container can be used."""

    argv: tuple[str, ...]
    deadline_s: float
    """From the start of the container."""
    timeout_s: float = 30.0
    """Of one run."""


class Mount(_Plan):
    """A file or folder of the task, shown read-only."""

    folder: str
    """Registered name of the task's folder."""
    source: str
    """Relative to it."""
    target: str


class SideService(_Plan):
    """A container beside the agent's."""

    name: str
    image: str
    names: tuple[str, ...] = ()
    """More host names."""
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    env: dict[str, str] = {}
    user: str = ""
    workdir: str = ""
    after: dict[str, Condition] = {}
    health: Health | None = None
    volumes: tuple[str, ...] = ()
    """NAME:/path or NAME:/path:ro."""
    mounts: tuple[Mount, ...] = ()
    tmpfs: tuple[str, ...] = ()
    init: bool = False
    read_only: bool = False
    shm_mb: int = 0
    memory_mb: int = 0
    cpus: float = 0.0


class McpServer(_Plan):
    """A server of tools that the task offers to agents."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str = ""
    command: str = ""
    args: tuple[str, ...] = ()


class ContainerPlan(_Plan):
    """Of the agent's container and of the grader's alike."""

    names: tuple[str, ...] = (MAIN,)
    """Host names of the agent's container among the services."""
    env: dict[str, str] = {}
    volumes: tuple[str, ...] = ()
    services: tuple[SideService, ...] = ()
    """In the order in which they can start."""
    after: dict[str, Condition] = {}
    """What the agent's container waits for, beside the health of each service."""
    health: Health | None = None
    """Of the agent's own container."""
    mcp_servers: tuple[McpServer, ...] = ()

    @property
    def text(self) -> str:
        """Its canonical JSON; empty for a plan of nothing."""
        return "" if self == ContainerPlan() else self.model_dump_json(exclude_defaults=True)


def read_plan(text: str) -> ContainerPlan:
    """Return the plan of `Setup.container`."""
    return ContainerPlan.model_validate_json(text or "{}")
