"""The table [sandbox]: backends, images, limits and the pool."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import CountOrZero, SandboxName, Table, UsedWith

_DOCKER = UsedWith(("backend", "fallback"), ("docker",))
_HARBOR = UsedWith(("backend", "fallback"), ("harbor",))
_IMAGES = UsedWith(("backend", "fallback"), ("docker", "harbor"))
_LIMITED = UsedWith(("backend", "fallback"), ("local", "docker"))


class SandboxTable(Table):
    """Where agents run and are graded."""

    max_sandboxes: CountOrZero = 0
    """Concurrent sandboxes for agents, grading and spares; 0 = as many as the run needs, at least 128."""
    backend: SandboxName = "local"
    """local = namespaces of this machine; docker = containers, which tasks with images need; harbor =
    sandboxes of Harbor's environments (clouds), whose agents call gateway.public_url; or an own one, as entry
    point, module:attribute or file.py:attribute."""
    fallback: SandboxName = ""
    """Backend used while `backend` is down, and for grading if `backend` cannot cut the network; empty =
    none: sandboxes wait for it, or fail."""
    environment: Annotated[str, _HARBOR] = ""
    """Kind of environment (e2b, modal, daytona, ...), or dotted path of a function that creates one:
    package.module:function (spec, folder) -> environment."""
    egress: Annotated[Literal["gateway", "open"], _HARBOR] = "gateway"
    """Network of agents: gateway = only the gateway's public URL, refused where the environment keeps no list
    of hosts; open = the Internet too."""
    image: Annotated[str, _IMAGES] = ""
    """Default image, for tasks without one."""
    program: Annotated[str, _DOCKER] = "docker"
    """The command line to use, docker or podman."""
    runtime: Annotated[str, _DOCKER] = ""
    """OCI runtime of the sandboxes; empty = the daemon's default."""
    user: Annotated[str, Field(pattern=r"^\d+(:\d+)?$"), _DOCKER] = "1000:1000"
    """With insitu running as root: user and group that everything in a sandbox runs as."""
    memory_mb: Annotated[int, Field(ge=512), _LIMITED] = 4096
    """Memory limit of one sandbox, including its in-memory files; local: requires control groups."""
    disk_mb: Annotated[CountOrZero, _DOCKER] = 0
    """Disk limit of one sandbox with a task's image; 0 = no limit. Needs storage with quotas:
    overlay2 on xfs mounted with pquota, btrfs (the image's content counts too) or zfs. Sandboxes without such
    an image write to memory."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The backends in use, the preferred one first."""
        return (self.backend, self.fallback) if self.fallback else (self.backend,)

    @model_validator(mode="after")
    def _fits_backend(self) -> Self:
        if self.fallback == self.backend:
            raise ValueError(f"fallback is the backend itself: {self.backend}")
        if "harbor" in self.kinds and not self.environment:
            raise ValueError("harbor needs sandbox.environment: one of Harbor's environments, e.g. e2b")
        return self
