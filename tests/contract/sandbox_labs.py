"""What a backend brings to the contract suite.

Another backend joins with one function and one entry in LABS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whet.sandbox.base import ExecResult, Sandbox, SandboxBackend
from whet.sandbox.docker import DockerBackend
from whet.sandbox.local import LocalBackend

NEEDS_DAEMON = {"docker"}
"""Labs that only `make test-full` opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """One backend under test."""

    backend: SandboxBackend
    image: str = ""
    """Image that boxes can be made of; empty = the backend has none."""


def local(_cache: Path, _image: str) -> Lab:
    return Lab(backend=LocalBackend())


def docker(cache: Path, image: str) -> Lab:
    return Lab(backend=DockerBackend(image, cache=cache), image=image)


LABS: dict[str, Callable[[Path, str], Lab]] = {"local": local, "docker": docker}


async def sh(box: Sandbox, script: str, timeout_s: float = 20.0) -> ExecResult:
    return await box.exec(["sh", "-c", script], timeout_s=timeout_s)


async def out(box: Sandbox, script: str) -> str:
    result = await sh(box, script)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()
