"""Harbor's environment interface over sandboxes of this machine, for tests of what is built on Harbor.

The shape is harbor.environments.base.BaseEnvironment of Harbor 0.24 and 0.25 (tests/full checks the real one
against the same signatures): text output, commands as one shell line, files moved by path.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.local import LocalBackend

MOST, ROOM = 256 << 20, 1 << 30
INSTALLED = ("/opt/agent", "/opt/pi", "/opt/node/bin")
"""Folders that an image of a cloud lets root make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFlags:
    disable_internet: bool = True
    network_allowlist: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeResult:
    stdout: str | None
    stderr: str | None
    return_code: int


class FakeEnvironment:
    """One environment; `backend` makes the sandbox behind it."""

    def __init__(
        self,
        backend: SandboxBackend,
        spec: SandboxSpec,
        *,
        disable_internet: bool = True,
        network_allowlist: bool = True,
    ) -> None:
        if spec.network == "none" and not disable_internet:
            raise ValueError("network_mode='no-network' is not supported by fake environment.")
        if spec.network == "gateway_only" and not network_allowlist:
            raise ValueError("network_mode='allowlist' is not supported by fake environment.")
        self._backend, self._spec = backend, spec
        self._flags = FakeFlags(disable_internet=disable_internet, network_allowlist=network_allowlist)
        self._way: tempfile.TemporaryDirectory[str] | None = None
        self._relay: asyncio.Server | None = None
        self._sandbox: Sandbox | None = None
        self.stopped = 0
        self.start_error: Exception | None = None
        self.cut_s: float | None = None
        """Seconds after which the way to a running command is cut, as clouds do; it goes on in the
        sandbox."""
        self.cuts = 0
        self._going_on: set[asyncio.Task[object]] = set()
        self.commands: list[str] = []
        """Everything that went over the command line."""

    @property
    def capabilities(self) -> FakeFlags:
        return self._flags

    async def start(self, force_build: bool) -> None:
        if self.start_error is not None:
            raise self.start_error
        spec = SandboxSpec(workdir=self._spec.workdir, places=("/logs", "/tests", *INSTALLED))
        url = urlsplit(self._spec.gateway_url)
        if self._spec.network != "none" and url.hostname == "127.0.0.1" and url.port:
            spec = replace(
                spec,
                network="gateway_only",
                gateway_port=url.port,
                gateway_socket=await self._internet(url.hostname, url.port),
            )
        self._sandbox = await self._backend.create(spec)

    async def _internet(self, host: str, port: int) -> Path:
        """Carry connections of the sandbox to the public URL, which is on this machine."""
        self._way = tempfile.TemporaryDirectory()
        path = Path(self._way.name, "way")

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while piece := await reader.read(65536):
                    writer.write(piece)
                    await writer.drain()
            writer.close()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, port)
            await asyncio.gather(copy(reader, back), copy(there, writer))

        self._relay = await asyncio.start_unix_server(carry, path)
        return path

    def _there(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("Environment not started")
        return self._sandbox

    async def stop(self, delete: bool) -> None:
        self.stopped += 1
        if self._sandbox is not None:
            await self._sandbox.close()
        if self._relay is not None:
            self._relay.close()
        if self._way is not None:
            await asyncio.to_thread(self._way.cleanup)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> FakeResult:
        self.commands.append(command)
        argv = ["sh", "-c", command]
        work = asyncio.ensure_future(
            self._there().exec(argv, timeout_s=timeout_sec or 3600, env=env, cwd=cwd, max_output_bytes=MOST)
        )
        if self.cut_s is not None:
            await asyncio.wait([work], timeout=self.cut_s)
            if not work.done():
                self.cuts += 1
                self._going_on.add(work)
                work.add_done_callback(self._going_on.discard)
                raise ConnectionResetError("stream was cut")
        done = await work
        code = 137 if done.exit_code is None or done.exit_code < 0 else done.exit_code
        out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
        return FakeResult(stdout=out or None, stderr=err or None, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._there().put(target_path, await asyncio.to_thread(Path(source_path).read_bytes))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        content = await self._there().get(source_path, max_bytes=MOST)
        if content is None:
            raise FileNotFoundError(source_path)
        await asyncio.to_thread(Path(target_path).write_bytes, content)


def local_environment(spec: SandboxSpec, folder: Path) -> FakeEnvironment:
    """For sandbox.environment: sandboxes of this machine under Harbor's interface."""
    return FakeEnvironment(LocalBackend(scratch_bytes=ROOM), spec)


def open_environment(spec: SandboxSpec, folder: Path) -> FakeEnvironment:
    """The same without a list of hosts."""
    return FakeEnvironment(LocalBackend(scratch_bytes=ROOM), spec, network_allowlist=False)


def shared_environment(spec: SandboxSpec, folder: Path) -> FakeEnvironment:
    """One that keeps nothing from the network, as Hugging Face's."""
    return FakeEnvironment(LocalBackend(), spec, disable_internet=False, network_allowlist=False)
