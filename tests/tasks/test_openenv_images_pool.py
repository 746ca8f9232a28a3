"""Containers of OpenEnv images, with a stand-in for docker; tests/bridges has a daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import config

from insitu.errors import GradeError, TaskError
from insitu.sandbox.process_owner import owner
from insitu.tasks.factory import open_rows
from insitu.types import Limits
from insitu_tasksets import openenv, openenv_images
from insitu_tasksets.openenv_images import ServerImage, ServerPool, close_all, gauges, image_of, pool_of
from tests.fakes.docker_cli import containers, install
from tests.fakes.environments_sdk import openenv_sdk

pytestmark = pytest.mark.slow
WAIT_S = 30.0


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a stand-in for docker."""
    for name, value in install(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(openenv_images, "_POOLS", {})
    monkeypatch.setattr(openenv_images, "PAUSE_S", 0.0)
    yield tmp_path
    close_all()
    assert containers(tmp_path) == []


def kill(folder: Path, number: int = 0) -> None:
    pid = int(str(containers(folder)[number]["pid"]))
    os.kill(pid, signal.SIGKILL)
    wait(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def wait(true: object) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_containers_start_when_asked_for_and_each_takes_its_sessions(docker: Path) -> None:
    pool = pool_of({"image": "guess:1", "containers": 2, "sessions": 1, "options": ["--env", "A=b"]})

    async def three() -> list[str]:
        async with pool.session() as one, pool.session() as two:
            third = asyncio.create_task(pool.session().__aenter__())
            await asyncio.sleep(3 * openenv_images._POLL_S)
            assert not third.done()  # both containers are in use
            assert gauges() == {
                "environments_up": 2,
                "environments_started": 2,
                "environments_restarts": 0,
                "environments_in_use": 2,
            }
            third.cancel()
            with pytest.raises(asyncio.CancelledError):
                await third
            return [one.url, two.url]

    urls = asyncio.run(three())
    assert len(set(urls)) == 2
    assert gauges()["environments_in_use"] == 0
    run = next(line for line in (docker / "calls").read_text().splitlines() if line.startswith("run "))
    assert f"--label insitu.owner={owner()} --publish 127.0.0.1::8000 --env A=b guess:1" in run
    close_all()
    assert containers(docker) == []
    with pool.blocking():  # a later run of the same process
        assert len(containers(docker)) == 1


def test_a_container_that_died_and_one_whose_sessions_fail_are_started_again(docker: Path) -> None:
    pool = pool_of({"image": "guess:1"})
    with pool.blocking() as lease:
        first = lease.url
    kill(docker)
    with pool.blocking() as lease:
        assert lease.url != first
    assert gauges()["environments_restarts"] == 1
    for _ in range(openenv_images.FAILURES):
        assert gauges()["environments_restarts"] == 1
        with pool.blocking() as lease:
            lease.failed("boom")
            lease.failed("boom")  # of one session: counted once
    with pool.blocking():
        assert gauges()["environments_restarts"] == 2


def test_a_container_that_never_works_is_given_up_with_its_cause(docker: Path) -> None:
    (docker / "broken").touch()
    pool = ServerPool(ServerImage(image="guess:1"))
    causes = []
    for _ in range(openenv_images.RESTARTS + 2):
        with pytest.raises(GradeError) as caught, pool.blocking():
            pass
        causes.append(str(caught.value))
        pool.containers[0]._again = 0.0
    assert causes[0] == "start guess:1: docker run: Error response from daemon: no space left."
    assert causes[-1].startswith("guess:1 was started 9 times and fails: docker run: Error response")
    pool.close()


def test_a_session_is_refused_by_one_line_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="podman is not installed: put docker or podman on PATH"):
        ServerPool(ServerImage(image="guess:1"))
    with pytest.raises(TaskError, match=r"x.toml: contaners: Extra inputs are not permitted"):
        image_of({"image": "guess:1", "contaners": 2}, Path("x.toml"))


LEAVES = """
import os, signal
from insitu_tasksets.openenv_images import ServerImage, ServerPool
pool = ServerPool(ServerImage(image="guess:1"))
with pool.blocking() as lease:
    print(lease.url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_container_outlives_its_process(docker: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False)
    assert (done.returncode, "http://127.0.0.1:" in done.stdout) == (-signal.SIGKILL, True), done.stderr
    wait(lambda: containers(docker) == [])


STARTS = """
from insitu_tasksets.openenv_images import ServerImage, ServerPool
with ServerPool(ServerImage(image="guess:1")).blocking():
    pass
"""


def test_no_container_that_starts_outlives_its_process(docker: Path) -> None:
    (docker / "slow").touch()
    with subprocess.Popen([sys.executable, "-c", STARTS]) as process:
        wait(lambda: (docker / "calls").exists() and "\nrun " in (docker / "calls").read_text())
        process.kill()
    assert (docker / "slow").exists()
    wait(lambda: not (docker / "slow").exists())
    wait(lambda: containers(docker) == [])


def test_a_server_is_asked_without_a_proxy(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_images, "START_S", 20.0)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pool_of({"image": "guess:1"}).blocking() as lease:
        assert lease.url


def test_what_a_dead_owner_left_is_removed(docker: Path) -> None:
    pool = ServerPool(ServerImage(image="guess:1"))
    with pool.blocking():
        path = next(docker.glob("*.json"))
        dead = subprocess.Popen(["true"])
        mark = owner(dead.pid)
        dead.wait()
        left = path.read_text().replace(str(containers(docker)[0]["name"]), "left").replace(owner(), mark)
        (docker / "left.json").write_text(left.replace(str(containers(docker)[0]["pid"]), "999999999"))
        ServerPool(ServerImage(image="other:1"))
        assert [one["name"] for one in containers(docker)] != ["left"]
        assert len(containers(docker)) == 1
    pool.close()


def test_tasks_of_an_image_and_an_action_as_a_tool(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in openenv_sdk().items():
        monkeypatch.setitem(sys.modules, name, module)
    schema = {"title": "GuessAction", "properties": {"number": {"type": "integer"}, "metadata": {}}}
    monkeypatch.setattr(openenv, "_action_schema", lambda url: schema)
    (docker / "guess.toml").write_text(
        'image = "guess:1"\ntool = "guess"\nresets = [{split = "train", index = 1}]\n'
    )

    def rows(path: str) -> list[dict[str, object]]:
        source = open_rows(config("openenv", path), Limits(), lambda plan: None)  # type: ignore[arg-type]
        return [dict(source.row(item.task)) for item in source.every()]

    [row] = rows(str(docker / "guess.toml"))
    assert (row["url"], row["server"], row["tool"]) == ("docker://guess:1", {"image": "guess:1"}, "guess")

    async def act() -> tuple[list[str], float | None]:
        async with openenv.reward.environment(row) as environment:  # type: ignore[attr-defined]
            with pytest.raises(Exception, match="4 is not"):
                environment._client.step = _fails
                await environment.call("guess", {"number": 3})
            del environment._client.step
            await environment.call("guess", {"number": 4})
            return [tool.parameters for tool in environment.tools], environment.earned

    parameters, earned = asyncio.run(act())
    assert "metadata" not in parameters[0]
    assert earned == pytest.approx(0.9)
    assert len(containers(docker)) == 1
    openenv.reward.close()  # type: ignore[attr-defined]
    assert containers(docker) == []


async def _fails(action: object) -> None:
    raise ConnectionError("4 is not an answer")


SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""
LEAVES_REAL = """
import os, signal, sys
from insitu_tasksets.openenv_images import ServerImage, ServerPool
with ServerPool(ServerImage(image="answers", options=("--network", sys.argv[1]))).blocking() as lease:
    print(lease.url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_no_container_of_a_real_daemon_outlives_its_process(docker_image: str, tmp_path: Path) -> None:
    def docker(*words: object) -> str:
        done = subprocess.run(["docker", *map(str, words)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    (tmp_path / "serves.py").write_text(SERVES)
    (tmp_path / "Dockerfile").write_text(
        f'FROM {docker_image}\nCOPY serves.py /\nCMD ["python3", "/serves.py"]\n'
    )
    docker("build", "--network", "none", "--tag", "answers", tmp_path)
    network = docker("network", "create", f"insitu-{tmp_path.name}"[:40])
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_REAL, network], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "http://127.0.0.1:" in done.stdout) == (-signal.SIGKILL, True), done.stderr
        wait(lambda: docker("ps", "--all", "--quiet", "--filter", "ancestor=answers") == "")
    finally:
        docker("network", "rm", network)
