"""Base of local and docker sandboxes: processes over the control socket, files over folder descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import BinaryIO, Self

from insitu.errors import SandboxError, SandboxLost, boundary
from insitu.sandbox import local_bwrap, tree
from insitu.sandbox.base import ExecResult, Owner, SandboxSpec
from insitu.sandbox.cgroup import OomCounter
from insitu.sandbox.control_channel import Control
from insitu.sandbox.host_faults import Fate
from insitu.sandbox.process import LINE_BYTES, STDERR_TAIL, LocalProcess, Output
from insitu.sandbox.socket_relay import SocketRelay
from insitu.stalls import awake_s, awake_timeout
from insitu.types import FileEntry, Tree


class SupervisedSandbox(ABC):
    """Implements insitu.sandbox.base.Sandbox over supervisor.py.

    `places`: writable folders, the work folder first. `owner`: host uid of the sandbox's user, -1 for the
    user of this process.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        control: Control,
        *,
        places: Sequence[str],
        env: Mapping[str, str],
        owner: int,
        kills: OomCounter,
    ) -> None:
        self._spec = spec
        self.fate = Fate(kills)
        control.on_loss = self.fate.lose
        self._control = control
        self._places = tuple(places)
        self._env = dict(env)
        self._owner = owner
        self._folders: dict[str, int] = {}
        self._relay: SocketRelay | None = None
        self._spawned: list[LocalProcess] = []
        self._closing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Wait for PID 1, start the gateway relay, write the files. The caller closes on failure."""
        fds = await self._control.ready()
        self._folders = dict(zip(self._places, fds, strict=False))
        if self._spec.network == "gateway_only" and self._spec.gateway_socket is not None:
            self._relay = SocketRelay(socket.socket(fileno=fds[len(self._places)]), self._spec.gateway_socket)
            await self._relay.start()
        await self._fill()

    async def _fill(self) -> None:
        """Write the spec's files, and give the roots to the sandbox's user."""
        for root in self._spec.roots:
            await self._give(root)
        if self._spec.files:
            await self.put_tree(self._spec.files)

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    def memory_kills(self) -> int:
        """Return the number of OOM kills; 0 without a counter."""
        return self.fate.kills.count()

    async def cpu_s(self) -> float:
        return await self._control.order("cpu") / 1000

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
        return await self._exec(
            "run", argv, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin, max_output_bytes=max_output_bytes
        )

    async def _exec(
        self,
        kind: str,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        begun, kills = awake_s(), self.memory_kills()
        fields = self._fields(argv, env, cwd)
        with boundary(SandboxError, "make pipes"), contextlib.ExitStack() as undo:
            out = Output(max_output_bytes)
            undo.callback(out.abandon)
            err = Output(max_output_bytes)
            undo.callback(err.abandon)
            source = local_bwrap.memory_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY)
            undo.pop_all()
        try:
            job, code = await self._control.start(kind, fields, (source, out.write_end, err.write_end))
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
                    async with awake_timeout(timeout_s):
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
            duration_s=awake_s() - begun,
            out_of_memory=self.memory_kills() > kills,
        )

    async def _kill_quietly(self, job: str) -> None:
        with contextlib.suppress(SandboxLost):
            await self._control.order("kill", job)

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> LocalProcess:
        fields = self._fields(argv, env, cwd)
        loop = asyncio.get_running_loop()
        with boundary(SandboxError, "spawn a process"), contextlib.ExitStack() as undo:
            in_read, in_write = _pipe(undo)
            out_read, out_write = _pipe(undo)
            stderr = Output(STDERR_TAIL, tail=True)
            undo.callback(stderr.finish)
            try:
                fds = (in_read.fileno(), out_write.fileno(), stderr.write_end)
                job, code = await self._control.start("keep", fields, fds)
            finally:
                in_read.close()
                out_write.close()
                stderr.started()
            reader = asyncio.StreamReader(limit=LINE_BYTES)
            source, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), out_read)
            undo.callback(source.close)
            transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, in_write)
            undo.pop_all()
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        process = LocalProcess(code, reader, source, writer, stderr, lambda: self._kill_quietly(job))
        self._spawned.append(process)
        return process

    def _place(self, path: str) -> tuple[int, str]:
        """Return the descriptor of the writable folder of `path`, and the path below it."""
        for place, fd in self._folders.items():
            if PurePosixPath(path).is_relative_to(place):
                return fd, str(PurePosixPath(path).relative_to(place))
        raise SandboxError(f"{path}: not in a writable folder of the sandbox")

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        folder, name = self._place(path)
        with boundary(SandboxError, f"put {path}"):
            tree.write_file(folder, name, FileEntry(content=content, executable=executable), self._owner)

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        self._work()
        folder, name = self._place(path)
        with boundary(SandboxError, f"get {path}"):
            return await asyncio.to_thread(tree.read_one, folder, name, max_bytes)

    async def put_tree(self, files: Tree, *, owner: Owner = "sandbox") -> None:
        with boundary(SandboxError, "fill the work folder"):
            await asyncio.to_thread(tree.write_tree, self._work(), files, self._owner_id(owner))

    async def lay(self, files: Tree, *, remove: Sequence[str] = (), owner: Owner = "sandbox") -> None:
        with boundary(SandboxError, "lay files over the work folder"):
            self._work()
            await asyncio.to_thread(self._lay, files, remove, self._owner_id(owner))

    def _lay(self, files: Tree, remove: Sequence[str], owner: int) -> None:
        for root in self._trees():
            gone = [self._inside(root, path) for path in remove if self._root_of(path) == root]
            new = {self._inside(root, path): files[path] for path in files if self._root_of(path) == root}
            tree.lay_tree(self._folders[root], new, gone, owner)

    def _trees(self) -> tuple[str, ...]:
        return (self._spec.workdir, *self._spec.roots)

    def _root_of(self, path: str) -> str:
        """Return the root of an absolute path, else the work folder."""
        return next((root for root in self._spec.roots if path.startswith(f"{root}/")), self._spec.workdir)

    def _inside(self, root: str, path: str) -> str:
        return path if root == self._spec.workdir else path.removeprefix(f"{root}/")

    async def _give(self, place: str) -> None:
        with boundary(SandboxError, f"give {place} to the sandbox"):
            await asyncio.to_thread(tree.give, self._folders[place], self._owner)

    def _owner_id(self, owner: Owner) -> int:
        """Return the uid for `owner`; without root on the host always the sandbox's."""
        return tree.ROOT if owner == "root" and self._owner >= 0 else self._owner

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        with boundary(SandboxError, "read the work folder"):
            self._work()
            return await asyncio.to_thread(self._read, max_bytes, max_files)

    def _read(self, max_bytes: int, max_files: int) -> Tree:
        found: dict[str, FileEntry] = {}
        for root in self._trees():
            inside = tree.read_tree(self._folders[root], max_bytes=max_bytes, max_files=max_files)
            prefix, work = ("", "/") if root == self._spec.workdir else (f"{root}/", f"{self._spec.workdir}/")
            # a file has one name: protected ones are known by that in the work folder
            named = ((prefix + path, entry) for path, entry in inside.items())
            found |= {path: entry for path, entry in named if not path.startswith(work)}
        return found

    def _work(self) -> int:
        if self._closing is not None or self._control.lost:
            raise SandboxLost("the sandbox has ended")
        return self._folders[self._spec.workdir]

    async def kill_all(self) -> None:
        await self._control.order("sweep")

    async def wipe(self) -> None:
        self._work()
        with boundary(SandboxError, "wipe the sandbox"):
            await asyncio.to_thread(self._empty)
        await self._control.order("ipc")

    def _empty(self) -> None:
        for fd in self._folders.values():
            tree.empty(fd)

    async def close(self) -> None:
        """End the sandbox; finishes even when cancelled."""
        if self._closing is None:
            self.fate.end()
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._relay is not None:
            await self._relay.close()
        self._control.close()
        for fd in self._folders.values():
            os.close(fd)
        await self._end()
        for process in self._spawned:
            process.close_pipes()

    @abstractmethod
    async def _end(self) -> None:
        """Clean up after the control socket is closed. Never raises."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _pipe(undo: contextlib.ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """Return both ends as files, which may be closed twice."""
    read, write = os.pipe2(os.O_CLOEXEC)
    ends = os.fdopen(read, "rb", buffering=0), os.fdopen(write, "wb", buffering=0)
    for end in ends:
        undo.callback(end.close)
    return ends
