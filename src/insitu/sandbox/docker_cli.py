"""The docker or podman command line as a subprocess, with timeouts and typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import orjson

from insitu.errors import BackendTimeout, ImageMissing, SandboxError, SandboxStartError, SetupError

ATONCE = 8
"""Most concurrent calls: more would only slow down all of them."""
PULLS = 4
"""Most concurrent downloads and builds. They take minutes: other calls must not wait for them."""
ANSWER_S = 30.0

_DAEMON = re.compile(
    r"cannot connect to the docker daemon|is the docker daemon running|error during connect"
    r"|cannot connect to podman|permission denied.*docker.*\.sock",
    re.IGNORECASE,
)
_MISSING = re.compile(
    r"no such image|manifest unknown|manifest for .* not found|pull access denied|repository does not exist"
    r"|invalid reference format|image not known|requested access to the resource is denied"
    r"|unable to find image|no such object",
    re.IGNORECASE,
)


class Cli:
    """`docker` or `podman`, with the daemon of its environment."""

    def __init__(self, program: str) -> None:
        found = shutil.which(program)
        if found is None:
            raise SetupError(
                f"{program} is not installed: put docker or podman on PATH, or use backend local"
            )
        host = os.environ.get("DOCKER_HOST", "")
        if host and not host.startswith("unix://"):
            raise SetupError(
                f"DOCKER_HOST is {host}: the daemon must run on this machine (unix://...); for one elsewhere"
                ' set sandbox.backend = "harbor" and sandbox.environment = '
                '"insitu_fleet.docker_host:docker_environment"'
            )
        self.program = found
        self.name = Path(program).name
        self._permits: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore, asyncio.Semaphore] | None = None

    def info(self) -> dict[str, object]:
        """Return the output of `info`. Blocking. Raises SetupError."""
        try:
            done = subprocess.run(
                [self.program, "info", "--format", "{{json .}}"],
                capture_output=True,
                timeout=ANSWER_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SetupError(f"{self.name}: {error}") from error
        try:
            info = orjson.loads(done.stdout)
        except orjson.JSONDecodeError:
            info = None
        errors = info.get("ServerErrors") if isinstance(info, dict) else None
        if done.returncode or not isinstance(info, dict) or errors:
            reason = str(errors[0]) if errors else last_line(done.stderr)
            raise SetupError(f"{self.name}'s daemon does not answer: {reason or done.returncode}")
        return info

    async def call(self, *arguments: str) -> bytes:
        """Return the standard output. Raises SandboxError, see `classify`."""
        code, out, err = await self.run(arguments)
        if code:
            raise classify(self.name, arguments[0], err)
        return out

    async def run(self, arguments: Sequence[str], *, timeout_s: float = ANSWER_S) -> tuple[int, bytes, bytes]:
        """Return exit code, standard output and error.

        Raises BackendTimeout, waiting for a permit included; SandboxStartError for a program that cannot be
        run. Finishes even when cancelled, so that the caller can undo what was done.
        """
        task = asyncio.get_running_loop().create_task(self._run(arguments, timeout_s))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await task
            raise

    def _permit(self, verb: str) -> asyncio.Semaphore:
        # A backend may serve one event loop after another; a semaphore serves one.
        loop = asyncio.get_running_loop()
        if self._permits is None or self._permits[0] is not loop:
            self._permits = loop, asyncio.Semaphore(ATONCE), asyncio.Semaphore(PULLS)
        _, calls, downloads = self._permits
        return downloads if verb in ("pull", "build") else calls

    async def _run(self, arguments: Sequence[str], timeout_s: float) -> tuple[int, bytes, bytes]:
        try:
            async with asyncio.timeout(timeout_s), self._permit(arguments[0]):
                return await run_program(self.program, arguments)
        except TimeoutError as error:
            raise BackendTimeout(f"{self.name} {arguments[0]} did not end within {timeout_s:g} s") from error


async def run_program(program: str, arguments: Sequence[str]) -> tuple[int, bytes, bytes]:
    """Run the program to its end, or until the caller is cancelled; return exit code, output and errors.

    Raises SandboxStartError when it cannot be run.
    """
    try:
        running = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxStartError(f"{Path(program).name}: {error}") from error
    try:
        out, err = await running.communicate()
    finally:
        if running.returncode is None:
            # The whole group: a helper that lives on would keep the pipes open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            await asyncio.shield(running.wait())
    return running.returncode or 0, out, err


def last_line(errors: bytes) -> str:
    """Return the line of an error output that gives the reason."""
    lines = [line.strip() for line in errors.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("See '", "Run '"))]
    return lines[-1].removeprefix("docker: ").removeprefix("Error: ")[:400] if lines else ""


def is_daemon_down(errors: bytes) -> bool:
    return _DAEMON.search(errors.decode("utf-8", "replace")) is not None


def classify(name: str, verb: str, errors: bytes) -> SandboxError:
    """Return the error of a failed call: ImageMissing, or SandboxStartError for all else."""
    text, reason = errors.decode("utf-8", "replace"), last_line(errors) or "no reason given"
    if is_daemon_down(errors):
        return SandboxStartError(f"{name}'s daemon does not answer: {reason}")
    if _MISSING.search(text):
        return ImageMissing(f"{name} {verb}: {reason}")
    return SandboxStartError(f"{name} {verb}: {reason}")
