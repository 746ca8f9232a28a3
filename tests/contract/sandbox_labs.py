"""What a backend brings to the contract suite.

Another backend joins with one class that has `backend()` and `image`, and one entry in LABS.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whet.sandbox.base import ExecResult, Sandbox, SandboxBackend
from whet.sandbox.docker import DockerBackend
from whet.sandbox.local import LocalBackend

SCRIPTS = Path(__file__).parents[2] / "scripts"
IMAGE = "whet-box:bookworm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """One backend under test."""

    backend: SandboxBackend
    image: str = ""
    """Image that boxes can be made of; empty = the backend has none."""


def local(_: Path) -> Lab:
    return Lab(backend=LocalBackend())


def docker(cache: Path) -> Lab:
    """Needs a daemon: `make test-full` starts one when there is none."""
    command = [SCRIPTS / "docker-base", IMAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return Lab(backend=DockerBackend(IMAGE, cache=cache), image=IMAGE)


LABS: dict[str, Callable[[Path], Lab]] = {"local": local, "docker": docker}


async def sh(box: Sandbox, script: str, timeout_s: float = 20.0) -> ExecResult:
    return await box.exec(["sh", "-c", script], timeout_s=timeout_s)


async def out(box: Sandbox, script: str) -> str:
    result = await sh(box, script)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()
