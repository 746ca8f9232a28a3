"""What a backend brings to the contract suite.

Another backend joins with one function and one entry in LABS.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from insitu.sandbox.base import ExecResult, Sandbox, SandboxBackend
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.harbor import HarborBackend
from insitu.sandbox.local import LocalBackend, Mode
from tests.fakes.harbor import FakeEnvironment

NEEDS_DAEMON = {"docker"}
"""Labs that only `make test-full` opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """One backend under test."""

    backend: SandboxBackend
    small: Callable[[int], SandboxBackend] | None = None
    """The same backend with that many bytes of memory for a whole sandbox."""
    image: str = ""
    """Image that sandboxes can be made of; empty = the backend has none."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Test -> why the backend does not promise what it asks for."""


def _local(mode: Mode) -> Lab:
    return Lab(backend=LocalBackend(mode), small=lambda size: LocalBackend(mode, memory_bytes=size))


def bubblewrap(_cache: Path, _image: str) -> Lab:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return _local("bubblewrap")


def namespaces(_cache: Path, _image: str) -> Lab:
    if os.geteuid() != 0:
        pytest.skip("the namespaces mode needs root")
    return _local("namespaces")


def docker(cache: Path, image: str) -> Lab:
    make = lambda size: DockerBackend(image, cache=cache, memory_bytes=size)  # noqa: E731
    return Lab(backend=DockerBackend(image, cache=cache), small=make, image=image)


_PIPES = "harbor: a spawned process has no input, and one stream of output"
_ARGUMENTS = "harbor: its wrappers carry the command's arguments too, which the test counts"
HARBOR_SKIPS = {
    "test_a_spawned_process_talks_and_dies_on_demand": _PIPES,
    "test_a_spawned_process_that_ends_by_itself": _PIPES,
    "test_kill_all_finds_daemons_and_spares_spawned": _PIPES,
    "test_a_timeout_spares_other_work": "harbor: the sandbox behind the fake ends what nobody holds",
    "test_wipe_empties_every_writable_place": "harbor: its own bookkeeping of a command lies in /tmp",
    "test_sandboxes_do_not_see_each_other": _ARGUMENTS,
    "test_binds_are_read_only": "harbor: it shows no folder of this machine",
    "test_kill_all_beats_a_fork_bomb": "harbor: it has no limit of processes",
    "test_the_gateway_is_reached_and_nothing_else": "harbor: it offers no network gateway_only",
    "test_a_full_disk_is_the_boxs_own": "harbor: complaints travel through the disk that is full",
}


def harbor(_cache: Path, _image: str) -> Lab:
    inner = LocalBackend()
    make = lambda spec, folder: FakeEnvironment(inner, spec)  # noqa: E731
    return Lab(backend=HarborBackend("fake", image="any", make=make), image="any", skips=HARBOR_SKIPS)


LABS: dict[str, Callable[[Path, str], Lab]] = {
    "bubblewrap": bubblewrap,
    "namespaces": namespaces,
    "docker": docker,
    "harbor": harbor,
}


async def sh(sandbox: Sandbox, script: str, timeout_s: float = 20.0) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def out(sandbox: Sandbox, script: str) -> str:
    result = await sh(sandbox, script)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()
