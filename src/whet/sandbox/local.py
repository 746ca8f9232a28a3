"""The `local` backend: a box is one private set of Linux namespaces, with no daemon, image or network.

The first process of a box is supervisor.py, driven over a socket; every later process is its child and so
inherits the same walls. All writable places are memory file systems whose folder descriptors the host holds:
files move without any path an agent could bend, and the kernel removes everything with the last process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import BinaryIO, Literal, Self

from whet.errors import PolicyUnsupported, SandboxError, SandboxLost, SandboxStartError, SetupError, boundary
from whet.sandbox import layout, local_bwrap, local_ns, tree
from whet.sandbox.base import Capability, ExecResult, SandboxSpec
from whet.sandbox.control import MAX_FDS, Control, readable
from whet.sandbox.forward import Forward
from whet.sandbox.process import LINE_BYTES, STDERR_TAIL, LocalProcess, Output
from whet.types import FileEntry, Tree

Mode = Literal["auto", "bubblewrap", "namespaces"]
OUTER_ID = 65534
CLOSE_S = 5.0


class LocalSandbox:
    """A live box; implements whet.sandbox.base.Sandbox."""

    def __init__(self, spec: SandboxSpec, process: subprocess.Popen[bytes], control: Control) -> None:
        self._spec = spec
        self._process = process
        self._control = control
        self._folders: dict[str, int] = {}
        self._owner = OUTER_ID if os.geteuid() == 0 else -1
        self._env = layout.environment(spec)
        self._forward: Forward | None = None
        self._spawned: list[LocalProcess] = []
        self._closing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Wait until PID 1 is ready and open the way to the gateway. The caller closes on failure."""
        fds = await self._control.ready()
        places = layout.writable(self._spec)
        self._folders = dict(zip(places, fds, strict=False))
        if self._spec.network == "gateway_only" and self._spec.gateway_socket is not None:
            self._forward = Forward(socket.socket(fileno=fds[len(places)]), self._spec.gateway_socket)
            await self._forward.start()
        if self._spec.files:
            await self.put_tree(self._spec.files)

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    def _fields(self, argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> list[str]:
        if not argv:
            raise SandboxError("an empty command")
        merged = self._env | dict(env or {})
        pairs = [f"{name}={value}" for name, value in merged.items()]
        return [cwd or self._spec.workdir, str(len(argv)), *argv, *pairs]

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
        begun = time.monotonic()
        fields = self._fields(argv, env, cwd)
        with boundary(SandboxError, "make pipes"):
            out, err = Output(max_output_bytes), Output(max_output_bytes)
            source = local_bwrap.memory_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY)
        try:
            job, code = await self._control.start("run", fields, (source, out.write_end, err.write_end))
        except BaseException:
            out.finish()
            err.finish()
            raise
        finally:
            os.close(source)
            out.started()
            err.started()
        timed_out = False
        exit_code: int | None = None
        try:
            with contextlib.suppress(SandboxLost):
                try:
                    async with asyncio.timeout(timeout_s):
                        exit_code = await asyncio.shield(code)
                except TimeoutError:
                    await asyncio.shield(self._control.order("kill", job))
                    await code
                    timed_out, exit_code = True, -signal.SIGKILL
        except asyncio.CancelledError:
            await asyncio.shield(self._kill_quietly(job))
            raise
        finally:
            stdout, stderr = out.finish(), err.finish()
        return ExecResult(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            timed_out=timed_out,
            truncated=out.truncated or err.truncated,
            duration_s=time.monotonic() - begun,
        )

    async def _kill_quietly(self, job: str) -> None:
        with contextlib.suppress(SandboxLost):
            await self._control.order("kill", job)

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> LocalProcess:
        loop = asyncio.get_running_loop()
        fields = self._fields(argv, env, cwd)
        in_read, in_write = os.pipe2(os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        stderr = Output(STDERR_TAIL, tail=True)
        try:
            job, code = await self._control.start("keep", fields, (in_read, out_write, stderr.write_end))
        except BaseException:
            os.close(in_write)
            os.close(out_read)
            stderr.finish()
            raise
        finally:
            os.close(in_read)
            os.close(out_write)
            stderr.started()
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        source, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(out_read, "rb")
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(in_write, "wb")
        )
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        process = LocalProcess(code, reader, source, writer, stderr, lambda: self._kill_quietly(job))
        self._spawned.append(process)
        return process

    def _place(self, path: str) -> tuple[int, str]:
        """Descriptor of the writable folder that holds `path`, and the path relative to it."""
        for place, fd in self._folders.items():
            if PurePosixPath(path).is_relative_to(place):
                return fd, str(PurePosixPath(path).relative_to(place))
        raise SandboxError(f"{path}: not in a writable folder of the box")

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        folder, name = self._place(path)
        with boundary(SandboxError, f"put {path}"):
            tree.write_file(folder, name, FileEntry(content=content, executable=executable), self._owner)

    async def put_tree(self, files: Tree) -> None:
        with boundary(SandboxError, "fill the work folder"):
            await asyncio.to_thread(tree.write_tree, self._work(), files, self._owner)

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        with boundary(SandboxError, "read the work folder"):
            return await asyncio.to_thread(
                tree.read_tree, self._work(), max_bytes=max_bytes, max_files=max_files
            )

    def _work(self) -> int:
        if self._closing is not None or self._control.lost:
            raise SandboxLost("the box is gone")
        return self._folders[self._spec.workdir]

    async def kill_all(self) -> None:
        await self._control.order("sweep")

    async def wipe(self) -> None:
        self._work()
        with boundary(SandboxError, "wipe the box"):
            await asyncio.to_thread(self._empty)
        await self._control.order("ipc")

    def _empty(self) -> None:
        for fd in self._folders.values():
            tree.empty(fd)

    async def close(self) -> None:
        """Ends the box; finishes even when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._forward is not None:
            await self._forward.close()
        self._control.close()
        for fd in self._folders.values():
            os.close(fd)
        if not await _ended(self._process, CLOSE_S):
            self._process.kill()
            await _ended(self._process, CLOSE_S)
        for process in self._spawned:
            process.close_pipes()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a child of ours. It ends only after the last process of its box has."""
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


class LocalBackend:
    """Makes local boxes; implements whet.sandbox.base.SandboxBackend.

    Raises SetupError on construction when this machine cannot isolate in the wanted mode.
    `memory_bytes` bounds the private memory of each process, not of the box; `max_processes` counts threads.
    The writable places live in memory: `work_bytes` bounds the work folder, `scratch_bytes` each other place.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        start_timeout_s: float = 20.0,
        work_bytes: int = 512 << 20,
        scratch_bytes: int = 128 << 20,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._sizes = (work_bytes, scratch_bytes)
        self._root = os.geteuid() == 0
        self._bwrap = shutil.which("bwrap") or ""
        self._python = sys.executable if not Path("/usr/bin/python3").exists() else "/usr/bin/python3"
        try:
            self._code = layout.compile_supervisor()
        except (OSError, subprocess.SubprocessError) as error:
            raise SetupError(f"no Python to run inside a box: {error}") from error
        self._mode = self._choose(mode)

    @property
    def name(self) -> str:
        return "local"

    @property
    def mode(self) -> Mode:
        """What `auto` came to."""
        return self._mode

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({"network_none", "gateway_only", "pid_isolation", "stdin_pipe", "resource_limits"})

    def _choose(self, wanted: Mode) -> Mode:
        reasons = []
        modes: tuple[Mode, ...] = ("bubblewrap", "namespaces") if wanted == "auto" else (wanted,)
        for mode in modes:
            reason = self._probe(mode)
            if not reason:
                return mode
            reasons.append(f"{mode}: {reason}")
        raise SetupError(f"no way to isolate a process here ({'; '.join(reasons)}); install bubblewrap")

    def _probe(self, mode: Mode) -> str:
        """Why `mode` does not work here; empty when it does."""
        if mode == "bubblewrap" and not self._bwrap:
            return "bwrap not found"
        if mode == "namespaces" and not self._root:
            return "needs root"
        self._mode = mode
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                process, errors = self._launch(SandboxSpec(), theirs)
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

    def _launch(self, spec: SandboxSpec, control: socket.socket) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        """The box's outermost process, and the file its start writes complaints to (the caller closes it)."""
        places = layout.writable(spec)
        port = spec.gateway_port if spec.network == "gateway_only" else 0
        numbers = (
            control.fileno(),
            port,
            OUTER_ID if self._root else -1,
            spec.max_processes or 0,
            spec.memory_bytes or 0,
        )
        program = layout.supervisor([*(str(number) for number in numbers), *places])
        steps = layout.plan(spec, self._code, *self._sizes)
        if self._mode == "bubblewrap":
            argv, fds = local_bwrap.command(self._bwrap, steps, program, as_root=self._root)
        else:
            fds = [local_bwrap.memory_file("\0".join(part for step in steps for part in step).encode())]
            argv = [self._python, "-I", "-S", "-B", str(Path(local_ns.__file__)), str(fds[0]), *program]
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
        if spec.network not in ("none", "gateway_only"):
            raise PolicyUnsupported(f"the local sandbox offers no network `{spec.network}`")
        if spec.network == "gateway_only" and spec.gateway_socket is None:
            raise PolicyUnsupported("network `gateway_only` needs the gateway's socket")

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        self._check(spec)
        ours, theirs = socket.socketpair()
        with theirs, boundary(SandboxStartError, "start a box"):
            try:
                process, errors = self._launch(spec, theirs)
            except BaseException:
                ours.close()
                raise
        box = LocalSandbox(spec, process, Control(ours))
        with errors:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await box.begin()
            except TimeoutError as error:
                await _abandon(box, process)
                raise SandboxStartError(f"a box was not ready within {self._start_timeout_s:g} s") from error
            except SandboxError as error:
                await _abandon(box, process)
                raise SandboxStartError(f"start a box: {_last_line(errors) or error}") from error
            except BaseException:
                await _abandon(box, process)
                raise
        return box


async def _abandon(box: LocalSandbox, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await box.close()


def _last_line(errors: BinaryIO) -> str:
    """The start's own words about why it failed."""
    errors.seek(0)
    lines = errors.read(65536).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
