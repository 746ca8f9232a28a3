"""A sandbox backend in memory: its programs are Python coroutines, its files a dictionary.

Tests of what uses sandboxes script it: which starts fail, which calls stumble, when a sandbox is lost.
Programs are found by `argv[0]`; what follows `sh -c` by its exact text. Killing a program cancels its
coroutine; a program that started others takes them along. Held to the contract suite of the real backends
(tests/contract).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import TracebackType
from typing import Self

from insitu.errors import PolicyUnsupported, SandboxError, SandboxLost
from insitu.sandbox.base import Capability, ExecResult, Owner, SandboxSpec
from insitu.sandbox.tree import TreeTooLarge, parts_of
from insitu.types import FileEntry, Tree
from tests.fakes.sandbox_programs import PROGRAMS
from tests.fakes.sandbox_run import FakeRun, Program

HOME = "/home/agent"
KILLED = -9
STDERR_TAIL = 16 << 10


class FakeBackend:
    """Implements insitu.sandbox.base.SandboxBackend."""

    def __init__(
        self,
        programs: Mapping[str, Program] | None = None,
        scripts: Mapping[str, Program] | None = None,
        *,
        name: str = "fake",
        capabilities: frozenset[Capability] = frozenset(
            {
                "network_none",
                "gateway_only",
                "pid_isolation",
                "resource_limits",
                "file_owner",
                "images",
                "binds",
            }
        ),
    ) -> None:
        self.programs: dict[str, Program] = {**PROGRAMS, **(programs or {})}
        self.scripts: dict[str, Program] = dict(scripts or {})
        self._name, self._capabilities = name, capabilities
        self.boot_errors: list[BaseException | None] = []
        """What the next starts end with, in order; None = well. Used up one by one."""
        self.call_errors: list[BaseException | None] = []
        """The same for put, get, wipe and kill calls of any sandbox."""
        self.boot_s = 0.0
        self.sandboxes: list[FakeSandbox] = []
        """Every sandbox ever made."""
        self.asked: list[SandboxSpec] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._capabilities

    @property
    def open(self) -> list[FakeSandbox]:
        return [sandbox for sandbox in self.sandboxes if not sandbox.closed]

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        self.asked.append(spec)
        needs = {"none": "network_none"}.get(spec.network, spec.network)
        if spec.network != "public" and needs not in self._capabilities:
            raise PolicyUnsupported(f"the {self._name} sandbox offers no network `{spec.network}`")
        if spec.network == "public":
            raise PolicyUnsupported(f"the {self._name} sandbox offers no network `public`")
        if spec.network == "gateway_only" and spec.gateway_socket is None:
            raise PolicyUnsupported("network `gateway_only` needs the gateway's socket")
        if spec.image and "images" not in self._capabilities:
            raise PolicyUnsupported(f"the {self._name} sandbox has no images")
        if self.boot_s:
            await asyncio.sleep(self.boot_s)
        stumble(self.boot_errors)
        sandbox = FakeSandbox(self, spec)
        self.sandboxes.append(sandbox)
        return sandbox


def stumble(errors: list[BaseException | None]) -> None:
    error = errors.pop(0) if errors else None
    if error is not None:
        raise error


class FakeSandbox:
    """Implements insitu.sandbox.base.Sandbox."""

    def __init__(self, backend: FakeBackend, spec: SandboxSpec) -> None:
        self._backend = backend
        self.spec = spec
        self.closed = False
        self.lost = False
        self.files: dict[str, FileEntry | str] = {}
        """By inside path; a text is a link to it."""
        self.roots: set[str] = set()
        """Paths that are root's."""
        self.running: dict[int, FakeRun] = {}
        self._pids = itertools.count(2)
        self._places = (spec.workdir, HOME, "/tmp", "/dev/shm", *spec.places)
        self._fill(spec.files, "sandbox")

    @property
    def workdir(self) -> str:
        return self.spec.workdir

    def _call(self) -> None:
        if self.closed or self.lost:
            raise SandboxLost("the sandbox has ended")
        stumble(self._backend.call_errors)

    def find(self, argv: Sequence[str]) -> Program | None:
        if len(argv) == 3 and argv[0] in ("sh", "bash") and argv[1] == "-c":
            return self._backend.scripts.get(argv[2])
        return self._backend.programs.get(argv[0])

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        parent: FakeRun | None = None,
    ) -> FakeRun:
        """Start a program; of a `parent` it is a child and dies with it."""
        if not argv:
            raise SandboxError("an empty command")
        if any("\0" in part for part in argv):
            raise SandboxError("a NUL character cannot be part of a command")
        if self.closed or self.lost:
            raise SandboxLost("the sandbox has ended")
        limit = self.spec.max_processes
        full = limit is not None and len(self.running) >= limit
        run = FakeRun(
            sandbox=self,
            pid=next(self._pids),
            argv=tuple(argv),
            env={"HOME": HOME, **self.spec.env, **(env or {})},
            cwd=cwd or self.spec.workdir,
            program=None if full else self.find(argv),
        )
        if full:
            run.err(b"cannot start a process: Resource temporarily unavailable\n")
        if parent is not None:
            parent.children.append(run)
        self.running[run.pid] = run
        run.begin(lambda: self.running.pop(run.pid, None))
        return run

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
        run = self.start(argv, env, cwd)
        run.feed(stdin)
        run.end_input()
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                code: int | None = await run.ended()
        except TimeoutError:
            await run.kill()
            timed_out, code = True, KILLED
        except asyncio.CancelledError:
            await run.kill()
            raise
        if self.lost or self.closed:
            code = None
        stdout, stderr = bytes(run.stdout), bytes(run.stderr)
        return ExecResult(
            exit_code=code,
            stdout=stdout[:max_output_bytes],
            stderr=stderr[:max_output_bytes],
            timed_out=timed_out,
            truncated=max(len(stdout), len(stderr)) > max_output_bytes,
            duration_s=time.monotonic() - begun,
        )

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> FakeProcess:
        run = self.start(argv, env, cwd)
        run.kept = True
        return FakeProcess(run)

    def path(self, path: str) -> str:
        """Checked and normal. Raises SandboxError for one that cannot be written from outside."""
        pure = PurePosixPath(path)
        for place in self._places:
            if pure.is_relative_to(place):
                return str(PurePosixPath(place, *parts_of(str(pure.relative_to(place)))))
        raise SandboxError(f"{path}: not in a writable folder of the sandbox")

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        self._call()
        self.files[self.path(path)] = FileEntry(content=content, executable=executable)

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        self._call()
        found = self.files.get(self.path(path))
        if not isinstance(found, FileEntry):
            return None
        if len(found.content) > max_bytes:
            raise SandboxError(f"{path} holds more than {max_bytes} bytes")
        return found.content

    def _fill(self, files: Tree, owner: Owner) -> None:
        for path, entry in files.items():
            inside = str(PurePosixPath(self.workdir, *parts_of(path)))
            self._remove(inside)
            for parent in PurePosixPath(inside).parents:
                self.files.pop(str(parent), None)
            self.files[inside] = entry
            if owner == "root":
                self.roots.add(inside)

    def _remove(self, inside: str) -> None:
        for path in list(self.files):
            if PurePosixPath(path).is_relative_to(inside):
                del self.files[path]
                self.roots.discard(path)

    async def put_tree(self, files: Tree, *, owner: Owner = "sandbox") -> None:
        self._call()
        self._remove(self.workdir)
        self._fill(files, owner)

    async def lay(self, files: Tree, *, remove: Sequence[str] = (), owner: Owner = "sandbox") -> None:
        self._call()
        for path in remove:
            self._remove(str(PurePosixPath(self.workdir, *parts_of(path))))
        self._fill(files, owner)

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        self._call()
        found = {
            str(PurePosixPath(path).relative_to(self.workdir)): entry
            for path, entry in sorted(self.files.items())
            if isinstance(entry, FileEntry) and PurePosixPath(path).is_relative_to(self.workdir)
        }
        if len(found) > max_files:
            raise TreeTooLarge("work folder has too many files")
        if sum(len(entry.content) for entry in found.values()) > max_bytes:
            raise TreeTooLarge("work folder holds too many bytes")
        return found

    async def kill_all(self) -> None:
        self._call()
        for run in list(self.running.values()):
            if not run.kept:
                await run.kill()

    async def wipe(self) -> None:
        self._call()
        self.files.clear()
        self.roots.clear()

    async def lose(self) -> None:
        """The sandbox dies under whoever uses it."""
        self.lost = True
        await self._end()

    async def _end(self) -> None:
        for run in list(self.running.values()):
            await run.kill()

    async def close(self) -> None:
        self.closed = True
        await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class FakeProcess:
    """Implements insitu.sandbox.base.Process."""

    def __init__(self, run: FakeRun) -> None:
        self._run = run
        self._taken = 0

    async def write(self, data: bytes) -> None:
        if self.poll() is not None:
            raise SandboxLost(f"the process ended with {self.poll()}")
        self._run.feed(data)

    async def readline(self, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            while b"\n" not in self._run.stdout[self._taken :] and self.poll() is None:
                await self._run.news()
        said = bytes(self._run.stdout[self._taken :])
        line = said[: said.find(b"\n") + 1] or said
        self._taken += len(line)
        return line

    def poll(self) -> int | None:
        return self._run.code

    async def wait(self, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            return await self._run.ended()

    async def kill(self) -> None:
        await self._run.kill()

    def stderr_tail(self) -> bytes:
        return bytes(self._run.stderr[-STDERR_TAIL:])
