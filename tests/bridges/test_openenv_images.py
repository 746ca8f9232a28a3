"""The images of the packages in envs/, built and started by a Docker daemon, before OpenEnv's validator."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from env_server import ENVS, NAMES, ROOT
from test_openenv_servers import SOLVE, client, episode, validate
from test_openenv_tools import DOORS, call, look_and_open, run_of

from insitu.types import Message, RequestKey, Status
from insitu_tasksets.openenv_images import gauges

pytestmark = [pytest.mark.bridge, pytest.mark.filterwarnings("default")]

PYTHON = "3.11"
"""The version of the base's Python."""
BASE = """
FROM {image}
COPY wheels /wheels
COPY bwrap /usr/bin/
ENV PIP_NO_INDEX=1 PIP_BREAK_SYSTEM_PACKAGES=1
RUN PYTHONPATH=$(echo /wheels/pip-*.whl) python3 -m pip install --find-links /wheels pip {packages}
"""
"""Without a registry and an index: what the packages need is in the base already."""
WAIT_S = 120.0


def called(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with insitu, and all that the packages need of an index."""
    folder = tmp_path_factory.mktemp("base") / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    called(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ROOT,
        *(ROOT / "packages").iterdir(),
    )
    only = ["--only-binary", ":all:", "--python-version", PYTHON]
    called(*pip, "download", *only, "--dest", folder, "--find-links", folder, *needed(), "pip", "setuptools")
    return folder


def needed() -> list[str]:
    """Return what the packages require."""
    files = [tomllib.loads((ENVS / name / "pyproject.toml").read_text()) for name in NAMES]
    return sorted({word for file in files for word in file["project"]["dependencies"]})


@pytest.fixture(scope="module")
def base(docker_image: str, wheels: Path) -> str:
    """An image with Python, pip and bubblewrap."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is not installed")
    shutil.copy(bwrap, wheels.parent)
    packages = " ".join(f"'{word}'" for word in needed())
    (wheels.parent / "Dockerfile").write_text(BASE.format(image=docker_image, packages=packages))
    called("docker", "build", "--network", "none", "--tag", "insitu-env-base", wheels.parent)
    return "insitu-env-base"


@pytest.fixture(scope="module")
def network(docker_host: str) -> Iterator[str]:
    name = "insitu-envs"
    called("docker", "network", "create", name)
    yield name
    called("docker", "network", "rm", name)


@contextlib.contextmanager
def running(image: str, network: str) -> Iterator[tuple[str, str]]:
    """Run a container as the READMEs say; yield its id and its URL when it answers."""
    readme = (ENVS / image / "README.md").read_text()
    (line,) = (line for line in readme.splitlines() if line.startswith("docker run -p 8000:8000 "))
    options = line.removeprefix("docker run -p 8000:8000 ").removesuffix(f" {image}").split()
    name = called("docker", "run", "--detach", "--network", network, *options, image)
    try:
        address = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        url = f"http://{called('docker', 'inspect', '--format', address, name)}:8000"
        ends = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
                break
            assert time.monotonic() < ends, called("docker", "logs", name)
            time.sleep(0.5)
        yield name, url
    finally:
        called("docker", "rm", "--force", name)


async def rewards(url: str) -> tuple[float, float]:
    """Return the rewards of an episode that solves the task, and of one that does nothing."""
    async with client(url) as env:
        solved, _ = await episode(env, SOLVE)
        untouched, _ = await episode(env)
    return solved.reward, untouched.reward


@pytest.mark.parametrize("name", NAMES)
def test_the_image_serves_and_passes_six_of_six(
    name: str, base: str, wheels: Path, network: str, tmp_path: Path
) -> None:
    context = tmp_path / name
    shutil.copytree(ENVS / name, context, ignore=shutil.ignore_patterns("__pycache__"))
    (context / "wheels").mkdir()
    for wheel in (*wheels.glob("insitu-*"), *wheels.glob("setuptools-*")):
        shutil.copy(wheel, context / "wheels")
    called("docker", "build", "--network", "none", "--build-arg", f"BASE={base}", "--tag", name, context)
    with running(name, network) as (container, url):
        code, report = validate("--url", url)
        assert (code, [check["passed"] for check in report["criteria"]]) == (0, [True] * 6), report
        assert called("docker", "exec", container, "id", "-u") == "1000"
        if name == "terminus_env":
            assert asyncio.run(rewards(url)) == (1.0, 0.0)
            state = "{{.State.Health.Status}}"
            ends = time.monotonic() + WAIT_S
            while (found := called("docker", "inspect", "--format", state, container)) != "healthy":
                assert time.monotonic() < ends, found
                time.sleep(1.0)


SMALL = "model.max_context_tokens=16384"
TASKS = """
image = "doors"
prompt = "Find the right door and open it."
resets = [{{ door = 4 }}, {{ door = 5 }}, {{ door = 6 }}]
containers = 2
sessions = 1
options = ["--network", "{network}"]
"""


@pytest.fixture
def doors(base: str, network: str, tmp_path: Path) -> str:
    """A task file of an image with an environment of tools."""
    (tmp_path / "doors.py").write_text(DOORS)
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\nCOPY doors.py /app/\nWORKDIR /app\n"
        'CMD ["python3", "-m", "uvicorn", "doors:app", "--host", "0.0.0.0", "--port", "8000"]\n'
    )
    called("docker", "build", "--network", "none", "--tag", "doors", tmp_path)
    (tmp_path / "doors.toml").write_text(TASKS.format(network=network))
    return str(tmp_path / "doors.toml")


def left() -> str:
    return called("docker", "ps", "--all", "--quiet", "--filter", "label=insitu.owner")


def test_an_agent_acts_on_containers_of_an_image_and_none_is_left(doors: str, tmp_path: Path) -> None:
    found, _, _ = run_of(tmp_path, doors, "script", look_and_open, SMALL)
    assert found == [(Status.OK, 0.75, "")] * 3
    assert (gauges()["environments_started"], gauges()["environments_up"], left()) == (2, 0, "")


def test_a_container_that_an_agent_ends_is_started_again(doors: str, tmp_path: Path) -> None:
    def fatal(text: str, key: RequestKey) -> Message:
        return call(key, "open_door", door=99) if key.turn == 0 else Message(role="assistant", text="So.")

    before = gauges()["environments_restarts"] if gauges() else 0
    found, _, _ = run_of(tmp_path, doors, "script", fatal, SMALL)
    assert {(status, reward) for status, reward, _ in found} == {(Status.INFRA_FAILED, None)}
    assert gauges()["environments_restarts"] > before
    assert left() == ""
