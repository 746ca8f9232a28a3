"""The `local` backend: a sandbox is a set of Linux namespaces, without daemon, image or network.

PID 1 is supervisor.py, driven over a socket; every other process is its child and inherits its restrictions.
All writable places are tmpfs, and the host holds descriptors of their folders. So files move without paths
that an agent could redirect, and the kernel removes everything with the last process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from insitu.errors import PolicyUnsupported, SandboxError, SandboxStartError, SetupError, boundary
from insitu.sandbox import local_bwrap
from insitu.sandbox import local_namespaces as local_ns
from insitu.sandbox import rootfs as layout
from insitu.sandbox import seccomp as syscalls
from insitu.sandbox.base import Capability, SandboxSpec
from insitu.sandbox.cgroup import Cgroup, Cgroups, CgroupSupport, OomCounter, find
from insitu.sandbox.control_channel import MAX_FDS, Control, readable
from insitu.sandbox.limits import NOBODY_ID, a_user, allow_open_files, has_own_users, is_root
from insitu.sandbox.setup_hints import advise, find_bwrap
from insitu.sandbox.supervised_sandbox import SupervisedSandbox

CLOSE_S = 5.0
KILLED_S = 1.0


class LocalSandbox(SupervisedSandbox):
    """Implements insitu.sandbox.base.Sandbox."""

    def __init__(
        self,
        spec: SandboxSpec,
        process: subprocess.Popen[bytes],
        control: Control,
        cgroup: Cgroup | None,
        user: int,
    ) -> None:
        super().__init__(
            spec,
            control,
            places=layout.writable(spec),
            env=layout.environment(spec),
            owner=user,
            kills=cgroup.kills if cgroup else OomCounter(),
        )
        self._process = process
        self._cgroup = cgroup

    async def _end(self) -> None:
        try:
            if not await _ended(self._process, CLOSE_S):
                self._kill()
                await _ended(self._process, CLOSE_S)
        except asyncio.CancelledError:
            # The loop ends: reap the child here.
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)
            if self._cgroup:
                self._cgroup.try_remove()
            raise
        if self._cgroup:
            await self._cgroup.remove()

    def _kill(self) -> None:
        self._process.kill()
        if self._cgroup:
            self._cgroup.kill()


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the outermost process, which ends after the last process of its sandbox."""
    if process.poll() is not None:
        return True
    fd = os.pidfd_open(process.pid)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await readable(fd)
    finally:
        os.close(fd)
    return process.poll() is not None


Mode = Literal["auto", "bubblewrap", "namespaces"]


class LocalBackend:
    """Implements insitu.sandbox.base.SandboxBackend.

    `memory_bytes`: of a whole sandbox, tmpfs included, where `cgroups` works. `work_bytes` and
    `scratch_bytes`: size of the work folder and of each other writable place. `hidden`: folders that no
    sandbox shows, beside insitu's own and the current one. `max_processes` of a spec counts threads; before
    Linux 5.14, which counts all sandboxes of a user together, it needs cgroups or one user per sandbox.
    Raises SetupError when this machine cannot isolate in the wanted mode.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        start_timeout_s: float = 20.0,
        memory_bytes: int = 4 << 30,
        work_bytes: int = 128 << 20,
        scratch_bytes: int = 64 << 20,
        hidden: Sequence[Path] = (),
        cgroups: Callable[[], CgroupSupport] = find,
    ) -> None:
        allow_open_files()
        self._start_timeout_s = start_timeout_s
        self._hidden = layout.hidden_folders(hidden)
        self._refused = syscalls.program(platform.machine())
        self._own_users = has_own_users()
        self._counts_per_sandbox = self._own_users or _kernel() >= (5, 14)
        self._sizes = (work_bytes, scratch_bytes)
        self._memory = memory_bytes
        self._found = cgroups()
        self._root = is_root()
        self._bwrap = find_bwrap()
        inside = layout.python_inside()
        self._python = sys.executable if inside.startswith(layout.OWN_PYTHON) else inside
        try:
            self._code = layout.compile_supervisor()
        except (OSError, subprocess.SubprocessError) as error:
            raise SetupError(f"no Python to run inside a sandbox: {error}") from error
        self._mode = self._choose(mode)

    @property
    def name(self) -> str:
        return "local"

    @property
    def mode(self) -> Mode:
        """The mode in use, never `auto`."""
        return self._mode

    @property
    def cgroups(self) -> Cgroups | None:
        """Control groups of sandboxes, None where they cannot be made."""
        return self._found.cgroups

    @property
    def why_no_cgroups(self) -> str:
        return self._found.why

    @property
    def capabilities(self) -> frozenset[Capability]:
        some: set[Capability] = {"syscall_filter"} if self._refused else set()
        if self._root:
            some.add("file_owner")
        if self._counts_per_sandbox or self.cgroups:
            some.add("resource_limits")
        if self.cgroups:
            some.add("sandbox_memory")
        return frozenset(some) | {
            "network_none",
            "gateway_only",
            "pid_isolation",
            "stdin_pipe",
            "binds",
            "roots",
        }

    def _choose(self, wanted: Mode) -> Mode:
        reasons = []
        # Mode namespaces needs root, and gives shared files their own inodes.
        both: tuple[Mode, ...] = ("namespaces", "bubblewrap") if self._root else ("bubblewrap", "namespaces")
        modes = both if wanted == "auto" else (wanted,)
        for mode in modes:
            reason = self._probe(mode)
            if reason and self.cgroups:
                found = self._found
                self._found = CgroupSupport(cgroups=None, why=f"no sandbox starts in one: {reason}")
                reason = self._probe(mode)
                self._found = found if reason else self._found
            if not reason:
                return mode
            reasons.append(f"{mode}: {reason}")
        advice = advise(bwrap_missing=not self._bwrap and (not self._root or wanted == "bubblewrap"))
        raise SetupError(f"no way to isolate a process here ({'; '.join(reasons)}); {advice}")

    def _probe(self, mode: Mode) -> str:
        """Return why `mode` does not work here, or ""."""
        if mode == "bubblewrap" and not self._bwrap:
            return "bwrap not found"
        if mode == "namespaces" and not self._root:
            return "needs root"
        self._mode = mode
        ours, theirs = socket.socketpair()
        with ours, theirs, contextlib.ExitStack() as after:
            try:
                cgroup = self._cgroup(SandboxSpec())
                if cgroup is not None:
                    after.callback(cgroup.end)
                process, errors = self._launch(SandboxSpec(), theirs, cgroup, self._user())
            except OSError as error:
                return str(error)
            theirs.close()
            ours.settimeout(self._start_timeout_s)
            line, fds = b"", list[int]()
            with contextlib.suppress(OSError):
                line, fds, _, _ = socket.recv_fds(ours, 64, MAX_FDS)
            for fd in fds:
                os.close(fd)
            ours.close()
            if line != b"ready\n":
                process.kill()
            process.wait(CLOSE_S)
            with errors:
                return "" if line == b"ready\n" else _last_line(errors) or f"exit code {process.returncode}"

    def _cgroup(self, spec: SandboxSpec) -> Cgroup | None:
        return self.cgroups.make(self._memory, spec.max_processes) if self.cgroups else None

    def _user(self) -> int:
        """Return the user id of a new sandbox; -1: the user of this process."""
        if not self._root:
            return -1
        return a_user() if self._own_users else NOBODY_ID

    def _launch(
        self, spec: SandboxSpec, control: socket.socket, cgroup: Cgroup | None, user: int
    ) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        """Start a sandbox; return its outermost process and its stderr, which the caller closes."""
        places = layout.writable(spec)
        port = spec.gateway_port if spec.network == "gateway_only" else 0
        numbers = (
            control.fileno(),
            port,
            user,
            (spec.max_processes or 0) if self._counts_per_sandbox else 0,
            spec.memory_bytes or 0,
        )
        program = layout.supervisor([*(str(number) for number in numbers), self._refused.hex(), "", *places])
        steps = layout.plan(spec, self._code, *self._sizes, self._hidden)
        if self._mode == "bubblewrap":
            argv, fds = local_bwrap.command(self._bwrap, steps, program, as_root=self._root)
        else:
            fds = [local_bwrap.memory_file("\0".join(part for step in steps for part in step).encode())]
            argv = [self._python, "-I", "-S", "-B", str(Path(local_ns.__file__)), str(fds[0]), *program]
        if cgroup is not None:
            argv = cgroup.command(argv)
        errors = open(local_bwrap.memory_file(b""), "rb", buffering=0)  # noqa: SIM115 - returned
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(*fds, control.fileno()),
                start_new_session=True,
                env={},
                cwd="/",
            )
        except OSError:
            errors.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return process, errors

    def _check(self, spec: SandboxSpec) -> None:
        if spec.root_setup:
            raise PolicyUnsupported("the local sandbox has no root: its system is this machine's own")
        if trouble := layout.root_trouble(spec.roots, spec.workdir):
            raise PolicyUnsupported(f"the local sandbox: {trouble}")
        if spec.image:
            raise PolicyUnsupported(f"the local sandbox has no images; {spec.image} needs backend docker")
        if spec.network not in ("none", "gateway_only"):
            raise PolicyUnsupported(f"the local sandbox offers no network `{spec.network}`")
        if spec.network == "gateway_only" and spec.gateway_socket is None:
            raise PolicyUnsupported("network `gateway_only` needs the gateway's socket")
        if spec.max_processes and "resource_limits" not in self.capabilities:
            raise PolicyUnsupported("the local sandbox cannot count a sandbox's processes: needs Linux 5.14")

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        self._check(spec)
        ours, theirs = socket.socketpair()
        with theirs, boundary(SandboxStartError, "start a sandbox"), contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            cgroup = self._cgroup(spec)
            if cgroup is not None:
                undo.callback(cgroup.end)
            process, errors = self._launch(spec, theirs, cgroup, user := self._user())
            undo.pop_all()
        sandbox = LocalSandbox(spec, process, Control(ours), cgroup, user)
        with errors:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await sandbox.begin()
            except TimeoutError as error:
                await _abandon(sandbox, process)
                raise SandboxStartError(
                    f"a sandbox was not ready within {self._start_timeout_s:g} s"
                ) from error
            except SandboxError as error:
                await _abandon(sandbox, process)
                raise SandboxStartError(f"start a sandbox: {_last_line(errors) or error}") from error
            except BaseException:
                await _abandon(sandbox, process)
                raise
        return sandbox

    async def reap(self) -> int:
        """Remove control groups of dead owners; return how many. Their sandboxes died with them."""
        return await asyncio.to_thread(self.cgroups.reap) if self.cgroups else 0


def _kernel() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


async def _abandon(sandbox: LocalSandbox, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await sandbox.close()


def _last_line(errors: BinaryIO) -> str:
    errors.seek(0)
    lines = errors.read(65536).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
