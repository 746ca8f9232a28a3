"""Servers of the packages in envs/, and a provider for OpenEnv's validator that runs one as a process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sources import SOURCES

ROOT = Path(__file__).parents[2]
ENVS = ROOT / "envs"
START_S = 120.0
NAMES = ("insitu_env", "terminus_env", "mini_swe_env")


def start(name: str, variables: dict[str, str] | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server of envs/ and return it with its URL when it is healthy."""
    return start_app(ENVS / name, "server.app:app", variables)


def start_app(
    folder: Path, app: str, variables: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start `app` of a folder, as MODULE:NAME, and return it with its URL when it is healthy."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    env = os.environ | {"PYTHONPATH": SOURCES, "PYTHONDONTWRITEBYTECODE": "1"} | (variables or {})
    command = [
        "uvicorn",
        app,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, env=env)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5) as reply:
            if reply.status == 200:
                return process, url
        if process.poll() is not None or time.monotonic() > deadline:
            stop(process)
            raise AssertionError(f"{app} in {folder} did not start: exit code {process.returncode}")
        time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


@contextlib.contextmanager
def serving(name: str, **variables: str) -> Iterator[str]:
    process, url = start(name, variables)
    try:
        yield url
    finally:
        stop(process)


class _Subject:
    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process, self.base_url = process, url

    def inspect(self) -> dict[str, Any]:
        return {"pid": self._process.pid}

    def logs(self, max_bytes: int = 1 << 16) -> str:
        return ""

    def exec(self, argv: list[str], timeout_s: float) -> Any:
        from openenv.validation.providers import ExecResult

        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
        return ExecResult(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def stop(self) -> None:
        stop(self._process)


class LocalProcess:
    """A provider of openenv.validation that starts the server as a process: no image, no network policy."""

    name = "local-process"
    supported_network_modes = frozenset({"public"})

    def __init__(self) -> None:
        from openenv.validation.types import ProviderCapability

        self.capabilities = frozenset({ProviderCapability.IMAGE_BUILD, ProviderCapability.EXEC})
        self._name = ""

    def build(self, root: Path, execution: object) -> str:
        self._name = Path(root).name
        return "sha256:" + hashlib.sha256(self._name.encode()).hexdigest()

    def start(self, spec: object) -> _Subject:
        return _Subject(*start(self._name))
