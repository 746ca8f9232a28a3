"""The sandbox contract, over every backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from insitu.sandbox.base import SandboxBackend
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.local import LocalBackend, Mode
from insitu.sandbox.setup_hints import find_bwrap
from insitu_fleet.docker_host import docker_environment
from insitu_fleet.harbor import HarborBackend
from insitu_lab.testing import SandboxContract
from tests.fakes.harbor import FakeEnvironment

pytestmark = pytest.mark.slow

_PIPES = "harbor: it spawns no processes"
_ARGUMENTS = "harbor: its wrappers carry the command's arguments too, which the test counts"
HARBOR_SKIPS = {
    "test_a_spawned_process_talks_and_dies_on_demand": _PIPES,
    "test_a_spawned_process_that_ends_by_itself": _PIPES,
    "test_kill_all_finds_daemons_and_spares_spawned": _PIPES,
    "test_kill_all_finds_what_cleared_its_environment_and_spares_spawned": _PIPES,
    "test_killing_a_spawned_process_kills_what_it_started": _PIPES,
    "test_long_lines_come_whole": _PIPES,
    "test_a_timeout_spares_other_work": _PIPES,
    "test_close_ends_everything_and_may_be_called_again": _PIPES,
    "test_wipe_empties_every_writable_place": "harbor: its own bookkeeping of a command lies in /tmp",
    "test_sandboxes_do_not_see_each_other": _ARGUMENTS,
    "test_binds_are_read_only": "harbor: it shows no folder of this machine",
    "test_kill_all_beats_a_fork_bomb": "harbor: it has no limit of processes",
    "test_the_gateway_is_reached_and_nothing_else": "harbor: its sandboxes reach the gateway at a URL",
    "test_a_full_disk_affects_one_sandbox_only": "harbor: complaints travel through the disk that is full",
}

PODMAN_SKIPS = {
    "test_an_image_is_used_or_refused": "podman: it makes no work folder that the image lacks",
}


def local_backend(mode: Mode, memory_bytes: int) -> LocalBackend:
    return LocalBackend(mode, memory_bytes=memory_bytes)


class TestBubblewrap(SandboxContract):
    """Local sandboxes by bubblewrap."""

    @pytest.fixture
    def backend(self) -> SandboxBackend:
        if not find_bwrap():
            pytest.skip("bubblewrap is not installed")
        return LocalBackend("bubblewrap")

    @pytest.fixture
    def small_backend(self) -> Callable[[int], SandboxBackend]:
        return partial(local_backend, "bubblewrap")


class TestNamespaces(SandboxContract):
    """Local sandboxes by namespaces."""

    @pytest.fixture
    def backend(self) -> SandboxBackend:
        if os.geteuid() != 0:
            pytest.skip("the namespaces mode needs root")
        return LocalBackend("namespaces")

    @pytest.fixture
    def small_backend(self) -> Callable[[int], SandboxBackend]:
        return partial(local_backend, "namespaces")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.full
class TestDocker(SandboxContract):
    """Sandboxes on a real Docker daemon."""

    @pytest.fixture
    def image(self, docker_image: str) -> str:
        return docker_image

    @pytest.fixture
    def backend(self, image: str, cache: Path) -> SandboxBackend:
        return DockerBackend(image, cache=cache)

    @pytest.fixture
    def small_backend(self, image: str, cache: Path) -> Callable[[int], SandboxBackend]:
        return lambda size: DockerBackend(image, cache=cache, memory_bytes=size)


@pytest.mark.full
class TestPodman(SandboxContract):
    """Sandboxes by podman, without a daemon."""

    exceptions = PODMAN_SKIPS

    @pytest.fixture
    def image(self, podman_image: str) -> str:
        return podman_image

    @pytest.fixture
    def backend(self, image: str, cache: Path) -> SandboxBackend:
        return DockerBackend(image, cache=cache, program="podman")

    @pytest.fixture
    def small_backend(self, image: str, cache: Path) -> Callable[[int], SandboxBackend]:
        return lambda size: DockerBackend(image, cache=cache, program="podman", memory_bytes=size)


@pytest.mark.full
class TestDockerHost(SandboxContract):
    """Containers of a daemon that is reached over TCP: docker's command line, podman's server."""

    exceptions = HARBOR_SKIPS | dict.fromkeys(
        (
            "test_no_privilege",
            "test_programs_can_tell_who_they_are",
            "test_system_is_read_only",
            "test_init_cannot_be_killed_or_read",
        ),
        "docker host: everything runs as the root of the container",
    )

    @pytest.fixture
    def image(self, podman_image: str, remote_daemon: str, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("DOCKER_HOST", remote_daemon)
        return podman_image

    @pytest.fixture
    def backend(self, image: str, cache: Path) -> SandboxBackend:
        kind = "insitu_fleet.docker_host:docker_environment"
        return HarborBackend(kind, image=image, make=docker_environment, cache=cache)


class TestHarbor(SandboxContract):
    """The adapter to Harbor, over a fake environment."""

    exceptions = HARBOR_SKIPS

    @pytest.fixture
    def image(self) -> str:
        return "any"

    @pytest.fixture
    def backend(self) -> SandboxBackend:
        inner = LocalBackend()
        return HarborBackend("fake", image="any", make=lambda spec, folder: FakeEnvironment(inner, spec))
