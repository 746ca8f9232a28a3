"""A test that does not run proves nothing: under scripts/test, a skip for a reason not listed here fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("insitu", deadline=None)  # machines are noisy: time is for benchmarks
settings.load_profile("insitu")

KNOWN_SKIPS = (
    r"no real model: .*",
    # Root and ordinary users are tested apart; no machine can do both.
    r"every other test already runs as an ordinary user",
    r"no Python that an ordinary user can run with insitu's dependencies",
    r"unprivileged user namespaces are off here: .*",
    r"only root can give files away",
    # scripts/test-unprivileged runs as a user with and without one.
    r"no control groups here: .*",
    r"the namespaces mode needs root",
    r"mounting a small disk needs root",
    # Where root runs in a container: insitu does without.
    r"bubblewrap is not installed",
    r"cannot mount a tmpfs: .*",
    r"no git in the sandbox",
    # `make conformance` runs these agents; installing them takes gigabytes.
    r"\w+ is not installed: insitu install \w+",
    # `make test-full` installs and starts a daemon where it is root.
    r"no docker daemon: .*",
    r"user namespaces are off here already: .*",
    # `scripts/setup-daemons` installs no podman; where it is, limits may keep it from starting containers.
    r"podman is not installed",
    r"podman: .*",
    r"the docker command line is not installed",
    # `make test-full` installs Slurm where it is root, which its daemons need.
    r"no Slurm here: .*",
    # Namespaces with a network each: only where this is root, outside of a container without them.
    r"no hosts here: .*",
    r"openssl is not installed",
    r"vLLM takes an update only when the request is whole: .*",
    # What one backend does not promise, with its reason (tests/contract/test_sandbox_contract.py).
    r"harbor: .*",
    r"this CPU has no bfloat16 products",
    r"docker host: .*",
    # `scripts/setup test` installs them where it may.
    r"no Chromium here: .*",
    r"playwright is not installed: .*",
    r"axe-core is not installed: .*",
    r"no Node 20 here: .*",
    r"no Python 3\.\d+ or newer here",
    # Too long for every change: `make test-full` and continuous integration run them.
    r"runs in make test-full",
    # Their packages are in an environment of its own.
    r"runs in scripts/test-bridges",
    r"runs in scripts/test-fleet",
    # Sources and environments that are on no index, or need another Python or many gigabytes.
    r"INSITU_\w+ names no .*",
    # Continuous integration gives them a limited time (tests/time_budget.py).
    r"left out after .* s: make test-full runs it",
)


def pytest_configure(config: pytest.Config) -> None:
    if seconds := os.environ.get("INSITU_FULL_BUDGET_S", ""):
        from time_budget import TimeBudget

        config.pluginmanager.register(TimeBudget(float(seconds)))
    from fast import FastTests, ProcessRule

    config.pluginmanager.register(ProcessRule())
    if os.environ.get("INSITU_FAST", "") == "1":
        config.pluginmanager.register(FastTests())
    if os.environ.get("INSITU_CHANGED", "") == "1":
        from changed import ChangedTests

        config.pluginmanager.register(ChangedTests())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("INSITU_BRIDGES", "") != "1":
        for item in items:
            if item.get_closest_marker("bridge") is not None:
                item.add_marker(pytest.mark.skip(reason="runs in scripts/test-bridges"))
    if os.environ.get("INSITU_RAY", "") != "1":
        for item in items:
            if item.get_closest_marker("ray") is not None:
                item.add_marker(pytest.mark.skip(reason="runs in scripts/test-fleet"))
    if os.environ.get("INSITU_FULL", "") != "1":
        for item in items:
            if item.get_closest_marker("full") is not None:
                item.add_marker(pytest.mark.skip(reason="runs in make test-full"))
        # Whole runs first: processes share the work file by file, and a long file begun last ends alone.
        items.sort(key=lambda item: "e2e" not in item.path.parts)


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """A docker daemon, where DOCKER_HOST then points; only for tests marked full."""
    from insitu.errors import SetupError
    from tests.fakes.docker_daemon import docker_daemon

    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_daemon())
        except SetupError as error:
            pytest.skip(str(error))
        yield host


@pytest.fixture(scope="session")
def docker_image(docker_host: str) -> str:
    """An image with Python on that daemon."""
    name = "insitu-sandbox:bookworm"
    script = Path(__file__).parents[1] / "scripts" / "docker-base"
    done = subprocess.run([script, name], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return name


@pytest.fixture(scope="session")
def podman_image() -> str:
    """An image with Python of podman on this machine; only for tests marked full."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    name = "localhost/insitu-sandbox:bookworm"
    script = Path(__file__).parents[1] / "scripts" / "docker-base"
    env = {**os.environ, "INSITU_DOCKER": "podman"}
    done = subprocess.run([script, name], env=env, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        pytest.skip(f"podman: {done.stderr.strip().splitlines()[-1]}")
    started = subprocess.run(
        ["podman", "run", "--rm", "--network", "none", name, "true"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if started.returncode:
        pytest.skip(f"podman: {started.stderr.strip().splitlines()[-1]}")
    return name


@pytest.fixture(scope="session")
def remote_daemon(podman_image: str) -> Iterator[str]:
    """DOCKER_HOST of podman's server, over TCP."""
    if shutil.which("docker") is None:
        pytest.skip("the docker command line is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    server = subprocess.Popen(["podman", "system", "service", "--time", "0", url])
    try:
        asked = ["docker", "--host", url, "version"]
        ends = time.monotonic() + 60
        while subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode:
            assert time.monotonic() < ends, "podman's server does not answer"
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real vLLM server on this machine's CPU; only for tests marked full. Its model computes what the warm
    start does and has an output head of its own, without which weights cannot be reloaded on a CPU."""
    from insitu.config import WARM_START
    from tests.fakes.vllm_server import installed_vllm, start_vllm, untied_copy

    venv = installed_vllm(Path(__file__).parents[1] / "scripts" / "setup-vllm")
    folder = tmp_path_factory.mktemp("vllm")
    model = untied_copy(WARM_START, folder / "model")
    with start_vllm(venv, model, folder / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def real_vllm(vllm_server: Any) -> Iterator[Any]:
    """The real vLLM server with the weights it started with, whatever the tests of a file load into it."""
    yield vllm_server

    async def restore() -> None:
        from insitu.engines.http import HttpOptions
        from insitu.engines.vllm import open_vllm

        async with open_vllm(HttpOptions(url=vllm_server.url, call_deadline_s=120.0)) as engine:
            await engine.load(vllm_server.model, engine.receipt.version + 1)

    asyncio.run(restore())


def unknown_skips(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("INSITU_KNOWN_SKIPS_ONLY", "") != "1":
        return []
    found = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(known, reason) for known in KNOWN_SKIPS):
            found.append(f"{report.nodeid}: {reason}")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and unknown_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in unknown_skips(config):
        terminalreporter.write_line(f"unexpected skip: {line}", red=True)
