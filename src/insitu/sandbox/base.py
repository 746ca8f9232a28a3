"""A Sandbox is an isolated place where a process can run and files move. It knows no agents and no rewards.

Rules: a spec that asks for more than a backend declares is refused before start. A killed process never
reports exit 0. Every wait has a deadline. `close` never raises and leaves no process, mount or file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

from insitu.types import WORKDIR, Tree

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
]
"""`resource_limits`: `memory_bytes` and `max_processes` hold. `sandbox_memory`: a control group bounds what
`memory_bytes` leaves out, all memory of a sandbox together; without it nothing but the machine does."""
Owner = Literal["sandbox", "root"]
"""Who owns files put into a sandbox: the user all of its processes run as, or one that none of them is. What
is root's no process of the sandbox can change, rename or remove, while it may add files of its own beside it.
Where `file_owner` is not among the capabilities, all is the sandbox's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A host path shown read-only inside the sandbox."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox must be. Paths inside are constant, so that prompts do not depend on the host."""

    workdir: str = WORKDIR
    """Inside path of the only folder that survives until capture; starts with `files`. Empty, in docker
    sandboxes only: where the image starts its processes."""
    files: Tree = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: str = ""
    """Image reference, for backends that have the capability `images`; empty = the backend's plain sandbox.
    What such a sandbox may write to the disk of its daemon is bounded only where `sandbox.disk_mb` says
    so."""
    binds: tuple[Bind, ...] = ()
    network: Network = "none"
    gateway_socket: Path | None = None
    """Host unix socket of the gateway, for network `gateway_only`."""
    gateway_port: int = 8080
    """Loopback port inside the sandbox at which the gateway is reached."""
    memory_bytes: int | None = None
    """Private writable memory of one process (RLIMIT_DATA): what it allocates. Neither what processes share
    (a shared mapping, System V shared memory) nor files in memory, which have caps of their own, nor the sum
    over processes: these the backend bounds where it has `sandbox_memory`."""
    max_processes: int | None = None
    """Processes and threads of the sandbox."""
    places: tuple[str, ...] = ()
    """Inside paths of more writable folders, empty at the start."""
    root_setup: bool = False
    """A sandbox of an image that begins as root, for `SupportsRootSetup`: until its first other command."""
    label: str = ""
    """Run id, for the reaper of leaked sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """`exit_code` is None only if the sandbox died; a killed process has 137 or -signal, never 0."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0
    out_of_memory: bool = False
    """Meanwhile the kernel killed a process of the sandbox for want of memory: of this command, or of another
    that ran beside it. Told only by sandboxes whose backend has `sandbox_memory`."""


class Process(Protocol):
    """A process started in a sandbox with pipes; dies with the sandbox."""

    async def write(self, data: bytes) -> None:
        """Write to stdin and drain. Raises SandboxLost when the process is gone."""

    async def readline(self, timeout_s: float) -> bytes:
        """One line of stdout with its newline; b"" at end of file. Raises TimeoutError."""

    def poll(self) -> int | None: ...

    async def wait(self, timeout_s: float) -> int:
        """Exit code. Raises TimeoutError."""

    async def kill(self) -> None:
        """Kill the process with everything it started; idempotent."""

    def stderr_tail(self) -> bytes:
        """Last bytes of stderr, bounded."""


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
        """Run to the end; a timeout kills the whole process tree."""

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process: ...

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Write one file at an inside path under the work folder, the sandbox's home or another place of
        it."""

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """Content of one regular file where `put` could write; None when there is none. No link is followed,
        and a link, pipe or device is no file. Raises SandboxError over `max_bytes`."""

    async def put_tree(self, files: Tree, *, owner: Owner = "sandbox") -> None:
        """Replace the content of the work folder by `files`."""

    async def lay(self, files: Tree, *, remove: Sequence[str] = (), owner: Owner = "sandbox") -> None:
        """Remove paths from the work folder, then put `files` over what is left. Whatever stands in the way
        of a file or its folders, a link say, is replaced and never followed."""

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        """Regular files of the work folder. Links, devices and sockets are left out.
        Raises SandboxError over a cap."""

    async def kill_all(self) -> None:
        """Kill every process in the sandbox but its init and those `spawn` returned; idempotent."""

    async def wipe(self) -> None:
        """Empty the work folder, the home and every other writable place of the sandbox."""

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
    """Makes sandboxes."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Ends within a time of the backend's own. Raises PolicyUnsupported or SandboxStartError."""


@runtime_checkable
class SupportsControl(Protocol):
    """A backend that bounds how many sandboxes there are, and keeps room for those that show who is to
    blame."""

    async def control(self, spec: SandboxSpec, lost: Sandbox | None = None) -> Sandbox:
        """As `create`, and waits for no sandbox of others; made where `lost` was."""


async def control_sandbox(backend: SandboxBackend, spec: SandboxSpec, lost: Sandbox | None = None) -> Sandbox:
    """A sandbox that shows whether sandboxes work just now where `lost` was made, one that failed.
    Raises PolicyUnsupported or SandboxStartError."""
    return await (
        backend.control(spec, lost) if isinstance(backend, SupportsControl) else backend.create(spec)
    )


@runtime_checkable
class SupportsReap(Protocol):
    """A backend of whose sandboxes something can outlive the process that made them."""

    async def reap(self) -> int:
        """Remove what is left of sandboxes whose owner (sandbox/process_owner.py) is gone; of how many
        there was some."""


@runtime_checkable
class SupportsRootSetup(Protocol):
    """A sandbox of a spec with `root_setup`. Nothing runs as root once anything else was asked of the
    sandbox."""

    async def exec_as_root(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """As `exec`, as the root of the sandbox's system: it owns files and users, and nothing of the
        machine."""

    async def end_root(self) -> None:
        """End what root has started, give the work folder to the sandbox's user, and be that user for
        good."""


@runtime_checkable
class ReportsOom(Protocol):
    """A sandbox that knows what the kernel did to it when memory ran out."""

    def memory_kills(self) -> int:
        """Processes killed for want of memory since the sandbox was made."""


def memory_kills(sandbox: Sandbox) -> int:
    """As `ReportsOom`; 0 for a sandbox that cannot tell."""
    return sandbox.memory_kills() if isinstance(sandbox, ReportsOom) else 0


@runtime_checkable
class ReportsCpu(Protocol):
    """A sandbox that knows how much its processes have computed."""

    async def cpu_s(self) -> float:
        """CPU seconds of everything that has run in the sandbox. Raises SandboxLost."""


async def cpu_s(sandbox: Sandbox) -> float:
    """As `ReportsCpu`; infinite for a sandbox that cannot tell."""
    return await sandbox.cpu_s() if isinstance(sandbox, ReportsCpu) else math.inf
