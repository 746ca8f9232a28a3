"""The docker or podman command line as a subprocess: every call has a deadline and fails in one typed line.

Callers: docker, docker_image, docker_sandbox.
"""

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
"""Calls under way: more would only make all of them slower."""
PULLS = 4
"""Downloads and builds under way, beside ATONCE: they take minutes, and what removes a sandbox must not
wait."""
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
    """One program, `docker` or `podman`, and the daemon its environment points to."""

    def __init__(self, program: str) -> None:
        found = shutil.which(program)
        if found is None:
            raise SetupError(
                f"{program} is not installed: put docker or podman on PATH, or use backend local"
            )
        host = os.environ.get("DOCKER_HOST", "")
        if host and not host.startswith("unix://"):
            raise SetupError(f"DOCKER_HOST is {host}: the daemon must run on this machine (unix://...)")
        self.program = found
        self.name = Path(program).name
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore, asyncio.Semaphore] | None = None

    def info(self) -> dict[str, object]:
        """What the daemon says of itself. Blocking. Raises SetupError."""
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
            said = orjson.loads(done.stdout)
        except orjson.JSONDecodeError:
            said = None
        errors = said.get("ServerErrors") if isinstance(said, dict) else None
        if done.returncode or not isinstance(said, dict) or errors:
            reason = str(errors[0]) if errors else last_line(done.stderr)
            raise SetupError(f"{self.name}'s daemon does not answer: {reason or done.returncode}")
        return said

    async def call(self, *arguments: str, timeout_s: float = ANSWER_S, stdin: bytes = b"") -> bytes:
        """Its standard output. Raises SandboxStartError for a daemon that is gone, ImageMissing for an image
        that is nowhere, else SandboxError, and its subclasses are what they say."""
        code, out, err = await self.run(arguments, timeout_s=timeout_s, stdin=stdin)
        if code:
            raise classify(self.name, arguments[0], err)
        return out

    async def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float = ANSWER_S,
        stdin: bytes = b"",
        patient: bool = True,
    ) -> tuple[int, bytes, bytes]:
        """Exit code, standard output and error. Raises BackendTimeout after the deadline, under which the
        wait for a turn lies too; SandboxStartError for a program that cannot be run. `patient` waits for
        the answer also when cancelled, so that the caller can undo what was done; else the call is ended."""
        if not patient:
            return await self._run(arguments, timeout_s, stdin)
        task = asyncio.get_running_loop().create_task(self._run(arguments, timeout_s, stdin))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await task
            raise

    def _turn(self, verb: str) -> asyncio.Semaphore:
        """A backend may serve one event loop after another; a semaphore serves one."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, asyncio.Semaphore(ATONCE), asyncio.Semaphore(PULLS)
        _, calls, has_kl_term = self._turns
        return has_kl_term if verb in ("pull", "build") else calls

    async def _run(
        self, arguments: Sequence[str], timeout_s: float, stdin: bytes
    ) -> tuple[int, bytes, bytes]:
        try:
            async with asyncio.timeout(timeout_s), self._turn(arguments[0]):
                return await self._process(arguments, stdin)
        except TimeoutError as error:
            raise BackendTimeout(f"{self.name} {arguments[0]} did not end within {timeout_s:g} s") from error

    async def _process(self, arguments: Sequence[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        try:
            process = await asyncio.create_subprocess_exec(
                self.program,
                *arguments,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxStartError(f"{self.name}: {error}") from error
        try:
            out, err = await process.communicate(stdin or None)
        finally:
            if process.returncode is None:
                # With what it started: a helper that lives on would keep the pipes, and so this wait, open.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(process.wait())
        return process.returncode or 0, out, err


def last_line(errors: bytes) -> str:
    """The one line of a complaint that says why."""
    lines = [line.strip() for line in errors.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("See '", "Run '"))]
    return lines[-1].removeprefix("docker: ").removeprefix("Error: ")[:400] if lines else ""


def says_daemon_gone(errors: bytes) -> bool:
    return _DAEMON.search(errors.decode("utf-8", "replace")) is not None


def classify(name: str, verb: str, errors: bytes) -> SandboxError:
    """What a failed call means for the sandbox that wanted it."""
    text, reason = errors.decode("utf-8", "replace"), last_line(errors) or "no reason given"
    if says_daemon_gone(errors):
        return SandboxStartError(f"{name}'s daemon does not answer: {reason}")
    if _MISSING.search(text):
        return ImageMissing(f"{name} {verb}: {reason}")
    return SandboxStartError(f"{name} {verb}: {reason}")
