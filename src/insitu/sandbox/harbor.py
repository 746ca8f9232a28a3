"""The `harbor` backend: sandboxes of Harbor's environments (E2B, Daytona, Modal, HF sandboxes and others).

Optional: `pip install 'insitu[harbor]'` on Python 3.12. `harbor_sdk.py` alone knows Harbor. Its environments
run a command to the end and move files; all else is made of that: output and exit code come back through
files, so that they are bytes and bounded, and a process is known by a mark in its environment. What an
environment cannot promise is not among the capabilities, and a spec that asks for it is refused before
anything starts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from insitu.backoff import retry
from insitu.errors import (
    PolicyUnsupported,
    SandboxError,
    SandboxLost,
    SandboxStartError,
    SetupError,
)
from insitu.sandbox import detached
from insitu.sandbox import harbor_scripts as scripts
from insitu.sandbox.archive import pack, unpack
from insitu.sandbox.base import Capability, ExecResult, Owner, SandboxSpec
from insitu.sandbox.harbor_process import HarborProcess
from insitu.sandbox.harbor_sdk import Environment, Factory, Result, foreign, of_kind
from insitu.sandbox.rootfs import HOME
from insitu.sandbox.tree import parts_of
from insitu.storage.ulid import new_ulid
from insitu.types import FileEntry, Tree

BOX = "INSITU_SANDBOX"
MARGIN_S = 60.0
"""For the way to a cloud and back, on top of what a command may take."""
ROUNDS = "100"
"""Looks of one call for the end of a command: some 20 s, well below where streams are cut."""
START_S = 1800.0
"""Of one start, image and all; a pool allows less."""
SHARED = frozenset({"singularity", "hf-sandbox"})
"""Environments whose sandboxes may share processes or a machine with others: no `pid_isolation`."""


class HarborBackend:
    """Implements insitu.sandbox.base.SandboxBackend over one kind of Harbor's environments."""

    def __init__(self, kind: str, *, image: str, make: Factory | None = None) -> None:
        """`image`: of specs that name none. Raises SetupError when Harbor or its vendor's library is not
        there."""
        self._kind, self._image = kind, image
        self._make = make or of_kind(kind)
        self._no_network = self._enforces_no_network()

    def _enforces_no_network(self) -> bool:
        """Harbor rejects a policy that an environment cannot enforce when it is made."""
        folder = Path(tempfile.mkdtemp(prefix="insitu-harbor-"))
        try:
            with foreign(SetupError, f"harbor {self._kind}"):
                self._make(SandboxSpec(image=self._image, network="public"), folder)
            with contextlib.suppress(SandboxError), foreign(SandboxError, "no network"):
                return self._make(SandboxSpec(image=self._image), folder).capabilities.disable_internet
            return False
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def name(self) -> str:
        return f"harbor:{self._kind}"

    @property
    def capabilities(self) -> frozenset[Capability]:
        own: set[Capability] = {"images"}
        if self._no_network:
            own.add("network_none")
        if self._kind not in SHARED:
            own.add("pid_isolation")
        return frozenset(own)

    def _check(self, spec: SandboxSpec) -> None:
        if not (spec.image or self._image):
            raise PolicyUnsupported(
                f"a sandbox of {self.name} needs an image: name one in the task or in sandbox.image"
            )
        if spec.network == "none" and not self._no_network:
            raise PolicyUnsupported(f"{self.name} cannot keep a sandbox from the network")
        if spec.network in ("gateway_only", "allowlist"):
            why = "its sandboxes reach no socket of this machine, and no list of hosts is kept"
            raise PolicyUnsupported(f"{self.name} offers no network `{spec.network}`: {why}")
        if not spec.workdir:
            raise PolicyUnsupported(f"{self.name} is not asked where an image starts: name a workdir")
        if spec.root_setup:
            raise PolicyUnsupported(f"{self.name} sets no sandbox up as root")
        for bind in spec.binds:
            raise PolicyUnsupported(f"{self.name} cannot show {bind.source} at {bind.target}: no binds there")
        if spec.memory_bytes or spec.max_processes:
            raise PolicyUnsupported(f"{self.name} has no limits by process")

    async def create(self, spec: SandboxSpec) -> HarborSandbox:
        self._check(spec)
        folder = Path(tempfile.mkdtemp(prefix="insitu-harbor-"))
        sandbox: HarborSandbox | None = None
        try:
            with foreign(SandboxStartError, f"start a sandbox of {self.name}"):
                image = spec.image or self._image
                wanted = SandboxSpec(image=image, network=spec.network, workdir=spec.workdir)
                environment = self._make(wanted, folder)
                sandbox = HarborSandbox(environment, spec, folder, alone=self._kind not in SHARED)
                async with asyncio.timeout(START_S):
                    await environment.start(force_build=False)
                await sandbox.begin()
        except BaseException:
            if sandbox is not None:
                await sandbox.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return sandbox


class HarborSandbox:
    """Implements insitu.sandbox.base.Sandbox. Everything in it runs as one user: `owner` is not told apart.

    A sandbox at a cloud outlives an owner that is killed, and nothing here reaps it: it ends at the vendor's
    own time limit. A timeout ends what carries the command's mark; what has cleared its environment goes with
    `kill_all`, and never in a kind of sandbox that is SHARED.
    """

    def __init__(self, environment: Environment, spec: SandboxSpec, folder: Path, *, alone: bool) -> None:
        """`alone`: every process in the sandbox is ours to kill."""
        self._env, self._spec, self._folder = environment, spec, folder
        self._id = new_ulid()
        self._alone, self._before = alone, ""
        self._closing: asyncio.Task[None] | None = None
        self._spawned: list[HarborProcess] = []
        self._looks = asyncio.Lock()
        self._told: list[str] = []
        """Folders of commands that have been told of; the next command removes them."""
        self._places = (spec.workdir, HOME, "/tmp", *spec.places)

    async def begin(self) -> None:
        await self._sh('mkdir -p "$@"', *self._places)
        self._before = await self._sh(scripts.LIST) if self._alone else ""
        if self._spec.files:
            await self.put_tree(self._spec.files)

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    async def _run(self, script: str, *arguments: str, timeout_s: float = MARGIN_S) -> Result:
        if self._closing is not None:
            raise SandboxLost("the sandbox is gone")
        command = shlex.join(["sh", "-c", script, "insitu", *arguments])
        with foreign(SandboxError, "a command in a sandbox"):
            async with asyncio.timeout(timeout_s + MARGIN_S):
                return await self._env.exec(command, cwd="/", timeout_sec=int(timeout_s + MARGIN_S))

    async def _sh(self, script: str, *arguments: str) -> str:
        result = await self._run(script, *arguments)
        if result.return_code != 0:
            said = (result.stderr or result.stdout or "").strip().splitlines()
            raise SandboxError(f"the sandbox: {said[-1] if said else f'exit code {result.return_code}'}")
        return result.stdout or ""

    async def _upload(self, content: bytes, target: str) -> None:
        source = self._folder / new_ulid()
        await asyncio.to_thread(source.write_bytes, content)
        try:
            with foreign(SandboxError, "send a file to a sandbox"):
                await self._env.upload_file(source, target)
        finally:
            source.unlink(missing_ok=True)

    async def _download(self, source: str) -> bytes:
        target = self._folder / new_ulid()
        try:
            with foreign(SandboxError, "fetch a file from a sandbox"):
                await self._env.download_file(source, target)
            return await asyncio.to_thread(target.read_bytes)
        finally:
            target.unlink(missing_ok=True)

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
        if not argv or any("\0" in part for part in argv):
            raise SandboxError("an empty command, or a NUL character in one")
        begun, call = time.monotonic(), new_ulid()
        folder = f"{detached.FOLDER}/{call}"
        done_with, self._told = self._told, []
        # By file, not by argument: an environment may hold secrets.
        merged = {"HOME": HOME, **self._spec.env, **(env or {}), BOX: self._id, "INSITU_CALL": call}
        await self._sh('mkdir -p "$1" && shift && rm -rf "$@"', folder, *done_with)
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in merged.items())
        await self._upload(lines.encode(), f"{folder}/env")
        await self._upload(stdin, f"{folder}/input")
        most, blocks = str(max_output_bytes + 1), str(max_output_bytes // 512 + 2)
        follow = (folder, most, ROUNDS, scripts.EXEC, cwd or self.workdir, blocks, *argv)
        work = asyncio.ensure_future(self._followed(follow))
        timed_out = False
        try:
            await asyncio.wait([work], timeout=timeout_s)
            if not work.done():
                timed_out = True
        finally:
            if not work.done():
                work.cancel()
                await asyncio.shield(self._surely(scripts.KILL_ALL, f"INSITU_CALL={call}"))
        try:
            told = await self._surely(scripts.TELL_LATE, folder, most) if timed_out else await work
            self._told.append(folder)
            return _read(told, timed_out, max_output_bytes, time.monotonic() - begun)
        except SandboxError:
            if self._closing is None:
                raise
            return ExecResult(exit_code=None, stdout=b"", stderr=b"", duration_s=time.monotonic() - begun)

    async def _followed(self, follow: Sequence[str]) -> Result:
        """What a command came to. It goes on when a call for it is cut, as clouds do after some minutes."""
        while True:
            told = await self._surely(scripts.FOLLOW, *follow)
            match (told.stdout or "").strip():
                case "running":
                    continue
                case "lost":
                    raise SandboxError("a command in a sandbox was not begun")
            return told

    async def _surely(self, script: str, *arguments: str) -> Result:
        """As _run, for a script that may be run again: made again when it fails on the way."""
        return await retry(
            lambda: self._run(script, *arguments),
            lambda error: isinstance(error, SandboxError) and not isinstance(error, SandboxLost),
            attempts=detached.STUMBLES,
            first_s=0.2,
            name="script",
        )

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> HarborProcess:
        """A detached run: it has no input, and its complaints are part of its output."""
        run = await detached.start(self, argv, env=env, cwd=cwd, hold=False, looks=self._looks)
        process = HarborProcess(run)
        self._spawned.append(process)
        return process

    def _path(self, path: str) -> str:
        for place in self._places:
            if PurePosixPath(path).is_relative_to(place):
                return str(PurePosixPath(place, *parts_of(str(PurePosixPath(path).relative_to(place)))))
        raise SandboxError(f"{path}: not in a writable folder of the sandbox")

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        place = PurePosixPath(self._path(path))
        await self._lay(str(place.parent), {place.name: FileEntry(content=content, executable=executable)})

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        argv = ["sh", "-c", scripts.GET, "get", self._path(path), str(max_bytes + 1)]
        result = await self.exec(argv, timeout_s=MARGIN_S, max_output_bytes=max_bytes + 3)
        if result.exit_code != 0:
            return None
        if len(result.stdout) > max_bytes + 2:
            raise SandboxError(f"{path} holds more than {max_bytes} bytes")
        return result.stdout[2:]

    async def put_tree(self, files: Tree, *, owner: Owner = "sandbox") -> None:
        await self._sh(scripts.EMPTY, self.workdir)
        await self.lay(files)

    async def lay(self, files: Tree, *, remove: Sequence[str] = (), owner: Owner = "sandbox") -> None:
        await self._lay(self.workdir, files, remove)

    async def _lay(self, at: str, files: Tree, remove: Sequence[str] = ()) -> None:
        place = f"{detached.FOLDER}/{new_ulid()}"
        gone = "\0".join("/".join(parts_of(path)) for path in remove)
        packed = await asyncio.to_thread(pack, files)
        top = next(each for each in self._places if PurePosixPath(at).is_relative_to(each))
        await self._sh(scripts.PLACE, place, at, top)
        await self._upload(gone.encode(), f"{place}/remove")
        await self._upload("\0".join(files).encode(), f"{place}/names")
        await self._upload(packed, f"{place}/tree.tar")
        await self._sh(scripts.LAY, at, place)

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        place = f"/tmp/.insitu-{new_ulid()}"
        most = max_bytes + 1024 * (4 * max_files + 1000)
        await self._sh(scripts.GET_TREE, self.workdir, str(most), place)
        packed = await self._download(place)
        await self._sh('rm -f "$1"', place)
        return await asyncio.to_thread(unpack, packed, max_bytes, max_files)

    async def kill_all(self) -> None:
        async with self._looks:
            kept = [f"{detached.MARK}={process.id}" for process in self._spawned if process.poll() is None]
            if self._alone:
                await self._sh(scripts.KILL_REST, self._before, *kept)
            else:
                await self._sh(scripts.KILL_ALL, f"{BOX}={self._id}", *kept)

    async def wipe(self) -> None:
        for place in self._places:
            await self._sh(scripts.EMPTY, place)
        await self._sh('mkdir -p "$@"', *self._places)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for process in self._spawned:
            process.forget()
        with contextlib.suppress(SandboxError), foreign(SandboxError, "end a sandbox"):
            async with asyncio.timeout(MARGIN_S):
                await self._env.stop(delete=True)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _read(told: Result, timed_out: bool, most: int, duration_s: float) -> ExecResult:
    lines = (told.stdout or "").split("\n")
    try:
        code, out, err = lines[0].strip(), *(base64.b64decode(line, validate=True) for line in lines[1:3])
    except ValueError as error:
        raise SandboxError(f"a command in a sandbox: {(told.stderr or 'no answer').strip()}") from error
    exit_code = int(code) if code.isdigit() else -9
    return ExecResult(
        exit_code=-9 if timed_out else exit_code,
        stdout=out[:most],
        stderr=err[:most],
        timed_out=timed_out,
        truncated=max(len(out), len(err)) > most,
        duration_s=duration_s,
    )
