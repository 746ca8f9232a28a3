"""The Sandbox protocol: an isolated place where processes run and files move.

A spec that needs a capability the backend lacks is refused before start. A killed process never reports exit
0. Every wait has a deadline. `close` never raises and leaves no process, mount or file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from insitu.types import WORKDIR, Setup, Tree

Network = Literal["none", "gateway_only", "allowlist", "public"]
Capability = Literal[
    "network_none",
    "gateway_only",
    "allowlist",
    "pid_isolation",
    "resource_limits",
    "sandbox_memory",
    "images",
    "binds",
    "stdin_pipe",
    "syscall_filter",
    "file_owner",
    "root_setup",
    "roots",
    "container",
]
"""`resource_limits`: `memory_bytes` and `max_processes` are enforced. `sandbox_memory`: a control group
bounds all memory of a sandbox together."""
GRADING: frozenset[Capability] = frozenset({"network_none", "pid_isolation"})
"""What grading needs of a backend."""
Owner = Literal["sandbox", "root"]
"""Owner of files put into a sandbox: the user of its processes, or root. No process of the sandbox can
change, rename or remove a file of root. Without the capability `file_owner` the sandbox's user owns
everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A host path shown read-only inside the sandbox."""

    source: Path
    target: str
    may_copy: bool = False
    """Without the capability `binds` a copy will do, which processes of the sandbox can change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Specification of a sandbox. Paths inside are constant, so that prompts do not depend on the host."""

    workdir: str = WORKDIR
    """Work folder, inside path; starts with `files`. Empty: the WORKDIR of the image, docker only."""
    files: Tree = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: str = ""
    """Image reference, needs capability `images`; empty = the backend's plain sandbox. Disk usage of such a
    sandbox is bounded only by `sandbox.disk_mb`."""
    binds: tuple[Bind, ...] = ()
    network: Network = "none"
    gateway_socket: Path | None = None
    """Host unix socket of the gateway, for network `gateway_only`."""
    gateway_port: int = 8080
    """Loopback port inside the sandbox at which the gateway is reached."""
    gateway_url: str = ""
    """Public URL of the gateway, for backends whose sandboxes reach no socket of this machine."""
    memory_bytes: int | None = None
    """Private writable memory of one process (RLIMIT_DATA). Shared memory, files in memory and the sum over
    processes are bounded by capability `sandbox_memory`."""
    max_processes: int | None = None
    """Processes and threads of the sandbox."""
    places: tuple[str, ...] = ()
    """More writable folders, inside paths; empty at the start."""
    roots: tuple[str, ...] = ()
    """More writable folders, part of the tree by absolute path; they start with what the image has there."""
    root_setup: bool = False
    """Start as root, see `SupportsRootSetup`; only for images."""
    cpus: float = 0.0
    """`Setup.cpus`; a backend that cannot limit them ignores it."""
    container: str = field(default="", repr=False)
    """`Setup.container`; needs capability `container`."""
    label: str = ""
    """Purpose, for logs and container labels."""

    @classmethod
    def of(cls, setup: Setup, **more: Any) -> SandboxSpec:
        """Return the specification of a task's sandbox, with more fields."""
        root, at = bool(setup.root_commands), setup.workdir
        beside, cpus = setup.container, setup.cpus
        own = cls(image=setup.image, workdir=at, roots=setup.roots, root_setup=root)
        return replace(own, cpus=cpus, container=beside, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a command. `exit_code` is None if the sandbox died, 137 or -signal if it was killed."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0
    out_of_memory: bool = False
    """The kernel's OOM killer ended a process of the sandbox meanwhile; needs `sandbox_memory`."""


class Process(Protocol):
    """A process with pipes; dies with its sandbox."""

    async def write(self, data: bytes) -> None:
        """Write to stdin and drain. Raises SandboxLost when the process has ended."""

    async def readline(self, timeout_s: float) -> bytes:
        """Return one line of stdout with its newline; b"" at end of file. Raises TimeoutError."""

    def poll(self) -> int | None: ...

    async def wait(self, timeout_s: float) -> int:
        """Return the exit code. Raises TimeoutError."""

    async def kill(self) -> None:
        """Kill the process tree; idempotent."""

    def stderr_tail(self) -> bytes:
        """Return the last bytes of stderr."""


class Sandbox(Protocol):
    """A live sandbox; an async context manager."""

    @property
    def workdir(self) -> str: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command to its end; a timeout kills the process tree."""

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process: ...

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Write one file in the work folder, the home or another writable place."""

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """Return the content of a regular file in a writable place, None without one.

        No link is followed. Raises SandboxError over `max_bytes`.
        """

    async def put_tree(self, files: Tree, *, owner: Owner = "sandbox") -> None:
        """Replace the content of the work folder."""

    async def lay(self, files: Tree, *, remove: Sequence[str] = (), owner: Owner = "sandbox") -> None:
        """Remove paths from the work folder and the roots, then write `files` over the rest.

        A link or file in place of a parent folder is replaced, never followed.
        """

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        """Return the regular files of work folder and roots; links, devices and sockets are left out.

        Raises SandboxError over a cap of one of these folders.
        """

    async def kill_all(self) -> None:
        """Kill every process but init and those that `spawn` returned; idempotent."""

    async def wipe(self) -> None:
        """Empty every writable place of the sandbox."""

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class SandboxBackend(Protocol):
    """A factory of sandboxes."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox within the backend's own timeout. Raises PolicyUnsupported, SandboxStartError."""


@runtime_checkable
class SupportsControl(Protocol):
    """A backend that limits the number of sandboxes, with separate permits for control sandboxes."""

    async def control(self, spec: SandboxSpec, lost: Sandbox | None = None) -> Sandbox:
        """Start a sandbox on the backend of `lost`, without waiting for a permit."""


async def control_sandbox(backend: SandboxBackend, spec: SandboxSpec, lost: Sandbox | None = None) -> Sandbox:
    """Start a sandbox to test whether the backend of `lost` works now.

    Raises PolicyUnsupported, SandboxStartError.
    """
    return await (
        backend.control(spec, lost) if isinstance(backend, SupportsControl) else backend.create(spec)
    )


@runtime_checkable
class SupportsReap(Protocol):
    """A backend whose sandboxes can outlive the process that made them."""

    async def reap(self) -> int:
        """Remove leaked sandboxes, whose owner (process_owner.py) has ended; return how many."""


@runtime_checkable
class SupportsRootSetup(Protocol):
    """A sandbox of a spec with `root_setup`: root until any other call."""

    async def exec_as_root(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run a command as root inside the sandbox, without rights on the host."""

    async def end_root(self) -> None:
        """Kill root's processes, give the work folder to the sandbox's user and drop root for good."""


@runtime_checkable
class _ReportsOom(Protocol):
    """A sandbox that counts kills by the OOM killer."""

    def memory_kills(self) -> int:
        """Return the number of OOM kills since the start."""


def memory_kills(sandbox: Sandbox) -> int:
    """Return the number of OOM kills; 0 where the sandbox does not report it."""
    return sandbox.memory_kills() if isinstance(sandbox, _ReportsOom) else 0


@runtime_checkable
class _CallsByUrl(Protocol):
    """A sandbox that may reach the gateway at its public URL."""

    @property
    def gateway_url(self) -> str: ...


def gateway_url(sandbox: Sandbox) -> str:
    """Return the public URL at which the gateway is reached; "" where it is a loopback port."""
    return sandbox.gateway_url if isinstance(sandbox, _CallsByUrl) else ""


@runtime_checkable
class _Terminates(Protocol):
    """A sandbox with processes beside those of its commands, which must live on."""

    async def terminate(self) -> None:
        """Send SIGTERM to the processes that commands started. Raises SandboxError."""


async def terminate(sandbox: Sandbox, timeout_s: float) -> None:
    """Send SIGTERM to every process of the sandbox that a command started. Raises SandboxError."""
    if isinstance(sandbox, _Terminates):
        await sandbox.terminate()
    else:
        await sandbox.exec(["/bin/sh", "-c", "kill -TERM -1"], timeout_s=timeout_s)


@runtime_checkable
class _ReportsCpu(Protocol):
    """A sandbox that reports its CPU time."""

    async def cpu_s(self) -> float:
        """Return CPU seconds of all processes since the start. Raises SandboxLost."""


async def cpu_s(sandbox: Sandbox) -> float:
    """Return CPU seconds since the start; infinite where the sandbox does not report it."""
    return await sandbox.cpu_s() if isinstance(sandbox, _ReportsCpu) else math.inf
