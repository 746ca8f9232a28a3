"""The `harbor` backend: sandboxes of Harbor's environments (E2B, Daytona, Modal, HF sandboxes and others).

Optional: `pip install 'insitu[harbor]'` on Python 3.12. Only `harbor_sdk.py` imports Harbor. Its environments
run a command to the end and move files. Output and exit code come back through files, as bounded bytes.
Processes carry a mark in their environment. A spec that needs a capability the environment lacks is refused
before anything starts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Self, cast

from insitu import registry
from insitu.backoff import retry
from insitu.config import Config
from insitu.errors import PolicyUnsupported, SandboxError, SandboxLost, SandboxStartError, SetupError
from insitu.sandbox.base import Bind, Capability, ExecResult, Owner, Process, SandboxSpec
from insitu.sandbox.rootfs import HOME
from insitu.sandbox.tree import parts_of
from insitu.storage.temp_dirs import cache_folder
from insitu.storage.ulid import new_ulid
from insitu.types import FileEntry, Tree
from insitu_fleet import harbor_scripts as scripts
from insitu_fleet.harbor_archive import pack, packed_copy, unpack
from insitu_fleet.harbor_leaks import Leaks
from insitu_fleet.harbor_sdk import Environment, Factory, Result, foreign, of_kind

MARK = "INSITU_SANDBOX"
FOLDER = "/tmp/.insitu"
RETRIES = 5
"""Attempts of a call that may be repeated."""
MARGIN_S = 60.0
"""Network latency to the cloud, on top of a command's own timeout."""
ROUNDS = "100"
"""Polls per call for the end of a command: some 20 s, less than clouds allow a stream."""
START_S = 1800.0
"""Timeout of one start, image included; a pool allows less."""
SHARED = frozenset({"singularity", "hf-sandbox"})
"""Environments whose sandboxes may share a PID namespace or a machine: no `pid_isolation`."""


class HarborBackend:
    """Implements insitu.sandbox.base.SandboxBackend over one kind of Harbor's environments."""

    def __init__(
        self, kind: str, *, image: str, make: Factory | None = None, cache: Path | None = None
    ) -> None:
        """Raise SetupError without Harbor or the vendor's library.

        `image`: default of specs. `cache`: host folder for packed agents and the list of sandboxes.
        """
        self._kind, self._image = kind, image
        self._cache = cache or cache_folder()
        self._make = make or of_kind(kind)
        self._leaks = Leaks(self._cache / "harbor" / "sandboxes", kind, self._make)
        self._packing = asyncio.Lock()
        self._own = self._network_capabilities()

    def _network_capabilities(self) -> frozenset[Capability]:
        # Harbor's constructor rejects a policy that the environment cannot enforce.
        folder, found = Path(tempfile.mkdtemp(prefix="insitu-harbor-")), set[Capability]()
        probe = SandboxSpec(image=self._image, gateway_url="https://gateway.example.com", label="probe")
        try:
            with foreign(SetupError, f"harbor {self._kind}"):
                self._make(replace(probe, network="public"), folder)
            with contextlib.suppress(SandboxError), foreign(SandboxError, "no network"):
                if self._make(replace(probe, network="none"), folder).capabilities.disable_internet:
                    found.add("network_none")
            with contextlib.suppress(SandboxError), foreign(SandboxError, "a list of hosts"):
                listed = self._make(replace(probe, network="gateway_only"), folder)
                if listed.capabilities.network_allowlist:
                    found.add("gateway_only")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return frozenset(found)

    @property
    def name(self) -> str:
        return f"harbor:{self._kind}"

    @property
    def capabilities(self) -> frozenset[Capability]:
        apart: set[Capability] = {"pid_isolation"} if self._kind not in SHARED else set()
        return self._own | apart | {"images"}

    async def reap(self) -> int:
        """End the sandboxes of killed runs that can be found by name; return how many."""
        return await self._leaks.reap()

    def _check(self, spec: SandboxSpec) -> None:
        if not (spec.image or self._image):
            raise PolicyUnsupported(
                f"a sandbox of {self.name} needs an image: name one in the task or in sandbox.image"
            )
        if spec.network == "none" and "network_none" not in self._own:
            raise PolicyUnsupported(f"{self.name} cannot keep a sandbox from the network")
        if spec.network == "allowlist" or (
            spec.network == "gateway_only" and "gateway_only" not in self._own
        ):
            raise PolicyUnsupported(
                f"{self.name} offers no network `{spec.network}`: it reaches no socket of this machine"
                " and keeps no list of hosts"
            )
        if spec.network == "gateway_only" and not spec.gateway_url:
            raise PolicyUnsupported(
                f"{self.name} reaches no socket of this machine, and the spec has no gateway_url"
            )
        if not spec.workdir:
            raise PolicyUnsupported(f"{self.name} is not asked where an image starts: name a workdir")
        if spec.roots:
            raise PolicyUnsupported(f"{self.name} reads only the work folder, not {', '.join(spec.roots)}")
        if spec.root_setup:
            raise PolicyUnsupported(f"{self.name} sets no sandbox up as root")
        for bind in (bind for bind in spec.binds if not bind.may_copy):
            raise PolicyUnsupported(f"{self.name} cannot show {bind.source} at {bind.target}: no binds there")
        if spec.memory_bytes or spec.max_processes:
            raise PolicyUnsupported(f"{self.name} has no limits by process")

    async def create(self, spec: SandboxSpec) -> _HarborSandbox:
        self._check(spec)
        folder = Path(tempfile.mkdtemp(prefix="insitu-harbor-"))
        name = f"insitu-{new_ulid().lower()}"
        sandbox: _HarborSandbox | None = None
        try:
            with foreign(SandboxStartError, f"start a sandbox of {self.name}"):
                copies = [(bind.target, await self._packed(bind)) for bind in spec.binds]
                environment = self._make(self._wanted(spec, name), folder)
                self._leaks.add(name, spec.image or self._image)
                sandbox = _HarborSandbox(
                    environment,
                    spec,
                    folder,
                    alone=self._kind not in SHARED,
                    ended=lambda: self._leaks.remove(name),
                )
                async with asyncio.timeout(START_S):
                    await environment.start(force_build=False)
                await sandbox.begin(copies)
        except BaseException:
            if sandbox is not None:
                await sandbox.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return sandbox

    def _wanted(self, spec: SandboxSpec, name: str) -> SandboxSpec:
        return SandboxSpec(
            image=spec.image or self._image,
            network=spec.network,
            workdir=spec.workdir,
            gateway_url=spec.gateway_url,
            label=name,
        )

    async def _packed(self, bind: Bind) -> Path:
        async with self._packing:
            return await asyncio.to_thread(packed_copy, bind.source, bind.target, self._cache)


class _HarborSandbox:
    """Implements insitu.sandbox.base.Sandbox; all files belong to one user, so `owner` is ignored.

    A timeout kills the processes that carry the command's mark. Those that cleared their environment are
    killed by `kill_all`, but not in a SHARED environment.
    """

    def __init__(
        self,
        environment: Environment,
        spec: SandboxSpec,
        folder: Path,
        *,
        alone: bool,
        ended: Callable[[], None],
    ) -> None:
        """`alone`: every process in the sandbox may be killed. `ended` is called when it has ended."""
        self._ended = ended
        self._env, self._spec, self._folder = environment, spec, folder
        self._id = new_ulid()
        self._alone, self._before = alone, ""
        self._closing: asyncio.Task[None] | None = None
        self._finished: list[str] = []
        """Folders of finished commands; the next command removes them."""
        self._places = (spec.workdir, HOME, "/tmp", *spec.places)

    @property
    def gateway_url(self) -> str:
        return self._spec.gateway_url

    async def begin(self, copies: Sequence[tuple[str, Path]]) -> None:
        """Make the places and unpack (target, archive) pairs."""
        await self._sh('mkdir -p "$@"', *self._places)
        for target, archive in copies:
            place = f"/tmp/.insitu-{new_ulid()}"
            with foreign(SandboxError, f"send {target} to a sandbox"):
                await self._env.upload_file(archive, place)
            await self._sh(scripts.UNPACK, target, place)
        self._before = await self._sh(scripts.LIST) if self._alone else ""
        if self._spec.files:
            await self.put_tree(self._spec.files)

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    async def _run(self, script: str, *arguments: str, timeout_s: float = MARGIN_S) -> Result:
        if self._closing is not None:
            raise SandboxLost("the sandbox has ended")
        command = shlex.join(["sh", "-c", script, "insitu", *arguments])
        with foreign(SandboxError, "a command in a sandbox"):
            async with asyncio.timeout(timeout_s + MARGIN_S):
                return await self._env.exec(command, cwd="/", timeout_sec=int(timeout_s + MARGIN_S))

    async def _sh(self, script: str, *arguments: str) -> str:
        result = await self._run(script, *arguments)
        if result.return_code != 0:
            output = (result.stderr or result.stdout or "").strip().splitlines()
            raise SandboxError(f"the sandbox: {output[-1] if output else f'exit code {result.return_code}'}")
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
        folder = f"{FOLDER}/{call}"
        finished, self._finished = self._finished, []
        # In a file, not in an argument: an environment may hold secrets.
        merged = {"HOME": HOME, **self._spec.env, **(env or {}), MARK: self._id, "INSITU_CALL": call}
        await self._sh('mkdir -p "$1" && shift && rm -rf "$@"', folder, *finished)
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
                await asyncio.shield(self._retry(scripts.KILL_ALL, f"INSITU_CALL={call}"))
        try:
            result = await self._retry(scripts.REPORT_LATE, folder, most) if timed_out else await work
            self._finished.append(folder)
            return _read(result, timed_out, max_output_bytes, time.monotonic() - begun)
        except SandboxError:
            if self._closing is None:
                raise
            return ExecResult(exit_code=None, stdout=b"", stderr=b"", duration_s=time.monotonic() - begun)

    async def _followed(self, follow: Sequence[str]) -> Result:
        """Poll a command until it ends; it goes on when a cloud cuts the call."""
        while True:
            result = await self._retry(scripts.FOLLOW, *follow)
            match (result.stdout or "").strip():
                case "running":
                    continue
                case "lost":
                    raise SandboxError("a command in a sandbox was not started")
            return result

    async def _retry(self, script: str, *arguments: str) -> Result:
        """Run an idempotent script, with retries."""
        return await retry(
            lambda: self._run(script, *arguments),
            lambda error: isinstance(error, SandboxError) and not isinstance(error, SandboxLost),
            attempts=RETRIES,
            first_s=0.2,
            name="script",
        )

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        raise PolicyUnsupported("a sandbox of Harbor runs commands to their end and has no pipes")

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
        place = f"{FOLDER}/{new_ulid()}"
        removed = "\0".join("/".join(parts_of(path)) for path in remove)
        packed = await asyncio.to_thread(pack, files)
        top = next(each for each in self._places if PurePosixPath(at).is_relative_to(each))
        await self._sh(scripts.PLACE, place, at, top)
        await self._upload(removed.encode(), f"{place}/remove")
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
        if self._alone:
            await self._sh(scripts.KILL_REST, self._before)
        else:
            await self._sh(scripts.KILL_ALL, f"{MARK}={self._id}")

    async def terminate(self) -> None:
        await self._sh(scripts.TERMINATE, f"{MARK}={self._id}")

    async def wipe(self) -> None:
        for place in self._places:
            await self._sh(scripts.EMPTY, place)
        await self._sh('mkdir -p "$@"', *self._places)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(SandboxError), foreign(SandboxError, "end a sandbox"):
            async with asyncio.timeout(MARGIN_S):
                await self._env.stop(delete=True)
            self._ended()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _read(result: Result, timed_out: bool, most: int, duration_s: float) -> ExecResult:
    lines = (result.stdout or "").split("\n")
    try:
        code, out, err = lines[0].strip(), *(base64.b64decode(line, validate=True) for line in lines[1:3])
    except ValueError as error:
        raise SandboxError(f"a command in a sandbox: {(result.stderr or 'no answer').strip()}") from error
    exit_code = int(code) if code.isdigit() else -9
    return ExecResult(
        exit_code=-9 if timed_out else exit_code,
        stdout=out[:most],
        stderr=err[:most],
        timed_out=timed_out,
        truncated=max(len(out), len(err)) > most,
        duration_s=duration_s,
    )


def harbor_backend(config: Config, work_bytes: int) -> HarborBackend:
    """Return sandboxes of one of Harbor's environments; raise SetupError."""
    table = config.sandbox
    return HarborBackend(table.environment, image=table.image, make=_factory(table.environment))


def _factory(environment: str) -> Factory | None:
    """Return the user's function that creates environments; None for one of Harbor's own."""
    found: Any = registry.load(environment) if ":" in environment else None
    return cast("Factory | None", found)
