"""Sandboxes of a docker or podman daemon on another machine, as an environment of the harbor backend.

    sandbox.environment = "insitu_fleet.docker_host:docker_environment", with sandbox.backend = "harbor"

The docker backend passes sockets and descriptors, which takes the same machine. No list of hosts is kept.
Needs no Harbor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import SandboxError, SandboxTransient
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.docker_cli import last_line, run_program

PULL_S, ANSWER_S = 1800.0, 300.0
IDLE = "while :; do sleep 86400; done"
"""Of PID 1, which no process of its container can kill while it handles no signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    disable_internet: bool = True
    network_allowlist: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    stdout: str | None
    stderr: str | None
    return_code: int


def docker_environment(spec: SandboxSpec, folder: Path) -> _DockerHost:
    """Return a container of the daemon that the `docker` command line reaches, not started."""
    return _DockerHost("docker", spec)


def podman_environment(spec: SandboxSpec, folder: Path) -> _DockerHost:
    """Return a container of the `podman` command line (CONTAINER_HOST for another machine), not started."""
    return _DockerHost("podman", spec)


class _DockerHost:
    """Implements insitu_fleet.harbor_sdk.Environment."""

    def __init__(self, program: str, spec: SandboxSpec) -> None:
        if spec.network not in ("none", "public"):
            raise ValueError(f"{program} keeps no list of hosts")
        self._program, self._spec = program, spec

    @property
    def capabilities(self) -> _Flags:
        return _Flags()

    async def _call(self, *arguments: str, timeout_s: float = ANSWER_S) -> _Result:
        try:
            async with asyncio.timeout(timeout_s):
                code, *found = await run_program(self._program, arguments)
        except TimeoutError as error:
            raise SandboxTransient(f"{self._program} {arguments[0]}: no end in {timeout_s:g} s") from error
        out, err = (text.decode("utf-8", "replace") or None for text in found)
        return _Result(stdout=out, stderr=err, return_code=code)

    async def _checked(self, *arguments: str, timeout_s: float = ANSWER_S) -> None:
        done = await self._call(*arguments, timeout_s=timeout_s)
        if done.return_code:
            raise SandboxError(f"{self._program} {arguments[0]}: {last_line((done.stderr or '').encode())}")

    async def start(self, force_build: bool) -> None:
        network = ["--network", "none"] if self._spec.network == "none" else []
        safe = ["--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--pids-limit", "4096"]
        safe += [f"--cap-add={name}" for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL")]
        name = ["--name", self._spec.label, "--hostname", "sandbox"]
        start = ["--entrypoint", "/bin/sh", self._spec.image, "-c", IDLE]
        await self._checked("run", "--detach", "--rm", *name, *network, *safe, *start, timeout_s=PULL_S)

    async def stop(self, delete: bool) -> None:
        done = await self._call("rm", "-f", "-v", self._spec.label)
        if done.return_code and "no such container" not in (done.stderr or "").lower():
            raise SandboxError(f"{self._program} rm: {(done.stderr or '').strip()[:200]}")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> _Result:
        words: Sequence[str] = ["--workdir", cwd or "/", self._spec.label, "/bin/sh", "-c", command]
        done = await self._call("exec", *words, timeout_s=timeout_sec or ANSWER_S)
        if done.return_code and (done.stderr or "").startswith(("error during connect", "Cannot connect")):
            raise SandboxTransient(f"{self._program} exec: {(done.stderr or '').splitlines()[0]}")
        return done

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._checked("cp", str(source_path), f"{self._spec.label}:{target_path}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._checked("cp", f"{self._spec.label}:{source_path}", str(target_path))
