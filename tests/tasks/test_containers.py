"""Tasks of several services in real containers: names, isolation, health, and what is left afterwards."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from insitu.errors import BackendTimeout, ImageUnavailable, PolicyUnsupported, RecordError
from insitu.grading.grader import GradeConfig, Grader
from insitu.sandbox.base import Sandbox, SandboxSpec
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.docker_cli import Cli
from insitu.sandbox.docker_image import Images
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool
from insitu.storage.image_builds import register_build
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import format_of
from insitu.types import FileEntry
from insitu_tasksets import containers
from insitu_tasksets.container_plan import ContainerPlan, Health, Mount, SideService
from insitu_tasksets.containers import Company, _run_arguments
from insitu_tasksets.live import everywhere
from insitu_tasksets.validate import check_item

SLOW = """\
#!/bin/sh
echo "$@" >> {0}/calls
case "$1" in
run) (setsid sh -c "sleep 1; touch {0}/made" > /dev/null 2>&1 &); sleep 30 ;;
rm) if [ -e {0}/made ]; then rm {0}/made; else echo "No such container" >&2; exit 1; fi ;;
network) [ "$2" != rm ] || [ ! -e {0}/made ] || exit 1 ;;
esac
"""


class SomeImages(Images):
    def __init__(self) -> None: ...

    async def get(self, reference: str) -> Any:
        return SimpleNamespace(id=reference)


@pytest.mark.slow
async def test_a_service_that_a_slow_daemon_makes_late_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "START_S", 0.2)
    monkeypatch.setattr(containers, "LATE_S", 1.5)
    (tmp_path / "docker").write_text(SLOW.format(tmp_path))
    (tmp_path / "docker").chmod(0o755)
    plan = ContainerPlan(services=(SideService(name="db", image="x"),))
    company = Company(plan, Cli(str(tmp_path / "docker")), SomeImages(), name="insitu-t", bounds=())
    with pytest.raises(BackendTimeout):
        await company.open()
    await company.close()
    await asyncio.gather(*containers._late)
    assert not (tmp_path / "made").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2:] == ["rm -f -v insitu-t-db", "network rm insitu-t"]


async def test_a_service_that_must_run_and_ended_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    health = Health(argv=("true",), deadline_s=1.0)
    seed = SideService(name="seed", image="x")
    job = SideService(name="job", image="x", after={"seed": "service_completed_successfully"})
    db = SideService(name="db", image="x", health=health)
    plan = ContainerPlan(services=(seed, job, db))
    company = Company(plan, cast("Cli", None), SomeImages(), name="insitu-t", bounds=())
    codes: dict[str, int | None] = {"seed": 0, "job": 0, "db": None}

    async def exit_code(name: str) -> int | None:
        return codes[name]

    async def last_words(name: str) -> str:
        return "bye"

    monkeypatch.setattr(company, "_exit_code", exit_code)
    monkeypatch.setattr(company, "_last_words", last_words)
    assert await company.fault() == ""
    codes["db"] = 0
    assert await company.fault() == "service db ended with 0: bye"
    codes.update(db=None, job=137)
    assert await company.fault() == "service job ended with 137: bye"


def test_a_mounted_file_is_the_task_s_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "a,src=x"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM x")
    (folder / "out").symlink_to("/etc")
    build = register_build(folder)

    def arguments(source: str) -> list[str]:
        mount = Mount(folder=build, source=source, target="/a")
        service = SideService(name="db", image="x", mounts=(mount,))
        return _run_arguments(service, "insitu-t", ())

    words = arguments("Dockerfile")
    shown = words[words.index("--mount") + 1]
    assert shown == f'type=bind,"src={folder}/Dockerfile",dst=/a,readonly'
    for source in ("out", "../x", "/etc"):
        with pytest.raises(RecordError, match="is not in the folder of the task"):
            arguments(source)


API = """\
FROM insitu-sandbox:bookworm
COPY serve.py /serve.py
CMD ["python3", "/serve.py"]
"""
SERVE = """\
import http.server, os, time
time.sleep(1)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == '/stop':
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ['WORD'].encode() + open('/conf').read().encode())
http.server.HTTPServer(('', 8000), Answer).serve_forever()
"""
COMPOSE = """\
services:
  main:
    environment: {API: "http://api:8000"}
    depends_on: {seed: {condition: service_completed_successfully}}
    volumes: ["shared:/shared"]
  api:
    build: ./api
    environment: [WORD=hello]
    volumes: ["./conf:/conf:ro"]
    healthcheck:
      test: ["CMD", "python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000')"]
      interval: 1s
      timeout: 5s
  seed:
    image: insitu-sandbox:bookworm
    command: sh -c 'echo seeded > /data/file && chmod -R a+rX /data'
    volumes: ["shared:/data"]
    depends_on: {api: {condition: service_healthy}}
volumes: {shared: }
"""
FETCH = "import os, urllib.request as r; print(r.urlopen(os.environ['API']).read().decode())"


def task_folder(root: Path) -> Path:
    texts = {
        "task.toml": "[environment]\ndocker_image = 'insitu-sandbox:bookworm'\nworkdir = '/app'\ncpus = 1\n",
        "instruction.md": "Write what the service says into out.txt.\n",
        "environment/docker-compose.yaml": COMPOSE,
        "environment/conf": "!",
        "environment/api/Dockerfile": API,
        "environment/api/serve.py": SERVE,
        "tests/test.sh": f'python3 -c "{FETCH}" > /tmp/right && cmp -s out.txt /tmp/right && R=1\n'
        "echo ${R:-0} > /logs/verifier/reward.txt\n",
        "solution/solve.sh": f'python3 -c "{FETCH}" > out.txt\n',
    }
    for name, text in texts.items():
        path = root / "ask" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def docker(docker_image: str, tmp_path: Path) -> DockerBackend:
    return DockerBackend(cache=tmp_path / "cache", user="1000:1000")


def left() -> str:
    """What of ours the daemon still has."""
    found = []
    for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
        argv = ["docker", *kind, "--filter", "label=insitu.owner", "--quiet"]
        found.append(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout)
    return "".join(found)


async def python(sandbox: Sandbox, code: str) -> str:
    done = await sandbox.exec(["python3", "-c", code], timeout_s=30)
    assert done.exit_code == 0, done.stderr.decode()
    return done.stdout.decode().strip()


REACH = """\
import socket
found = []
for host, port in (("1.1.1.1", 53), ("198.18.0.1", 22), (gateway, 22)):
    try:
        socket.create_connection((host, port), 2).close()
        found.append(host)
    except OSError:
        pass
try:
    found.append(socket.gethostbyname("example.com"))
except OSError:
    pass
print(found)
"""
GATEWAY = """\
route = [line.split() for line in open("/proc/net/route")][1:]
raw = bytes.fromhex(next(row[2] for row in route if row[1] == "00000000"))
gateway = ".".join(str(byte) for byte in reversed(raw))
"""


@pytest.mark.full
async def test_services_are_reached_by_name_and_nothing_else_is(
    docker: DockerBackend, tmp_path: Path
) -> None:
    (item,) = RowSource("harbor", format_of("harbor"), task_folder(tmp_path)).every()
    spec = SandboxSpec.of(item.task.setup, label="test")
    async with await docker.create(spec) as one, await docker.create(spec) as two:
        assert await python(one, FETCH) == "hello!"
        assert await python(one, "print(open('/shared/file').read())") == "seeded"
        assert await python(one, GATEWAY + REACH) == "[]"
        assert await python(one, "import os; print(os.environ['API'])") == "http://api:8000"
        assert (await python(two, "import socket; print(socket.gethostbyname('main'))")).startswith("198.1")
        # The other rollout's services are its own.
        stop = "import urllib.request as r\ntry: r.urlopen('http://api:8000/stop')\nexcept OSError: pass"
        await python(two, stop)
        assert await python(one, FETCH) == "hello!"
    assert left() == ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("service", "message"),
    [
        (
            {"command": ("sh", "-c", "echo no disk >&2; exit 4")},
            r"service db ended with 4: no disk",
        ),
        (
            {"command": ("sleep", "60")},
            r"service db is not healthy after 1 s: it printed nothing",
        ),
    ],
)
async def test_a_service_that_does_not_start_is_a_failure_in_one_line_that_leaves_nothing(
    docker: DockerBackend, service: dict[str, tuple[str, ...]], message: str
) -> None:
    health = Health(argv=("false",), deadline_s=1.0)
    db = SideService(name="db", image="insitu-sandbox:bookworm", health=health, **service)  # type: ignore[arg-type]
    spec = SandboxSpec(image="insitu-sandbox:bookworm", container=ContainerPlan(services=(db,)).text)
    with pytest.raises(ImageUnavailable, match=f"^{message}$"):
        await docker.create(spec)
    assert left() == ""


@pytest.mark.full
async def test_a_task_without_services_has_variables_and_a_health_check(docker: DockerBackend) -> None:
    health = Health(
        argv=("sh", "-c", 'test -e ready || { touch ready; false; }; echo "$A" > seen'), deadline_s=9
    )
    plan = ContainerPlan(env={"A": "b c"}, health=health)
    spec = SandboxSpec(image="insitu-sandbox:bookworm", workdir="/app", container=plan.text)
    async with await docker.create(spec) as sandbox:
        assert await sandbox.get("/app/seen") == b"b c\n"
        assert "lo" in await python(sandbox, "import os; print(os.listdir('/sys/class/net'))")
    sick = ContainerPlan(health=Health(argv=("sh", "-c", "echo sick; false"), deadline_s=0.5))
    with pytest.raises(ImageUnavailable, match=r"^the task's health check fails after 0\.5 s: sick$"):
        await docker.create(SandboxSpec(image="insitu-sandbox:bookworm", workdir="/app", container=sick.text))
    assert left() == ""


@pytest.mark.full
@pytest.mark.parametrize("transform", [None, everywhere])
async def test_a_task_with_services_is_validated(
    docker: DockerBackend, tmp_path: Path, transform: Callable[..., object] | None
) -> None:
    source = RowSource("harbor", format_of("harbor"), task_folder(tmp_path), transform=transform)
    grader = Grader(docker, GradeConfig(timeout_s=30.0))
    found = await check_item(grader, docker, next(iter(source.every())), 1)
    await grader.close()
    assert (found.status, found.reason) == ("passed", "")
    assert left() == ""


SEPARATE = """\
artifacts = ["out.txt", "/srv/made"]
[environment]
docker_image = "insitu-sandbox:bookworm"
workdir = "/app"
[verifier]
environment_mode = "separate"
"""
JUDGE = "FROM insitu-sandbox:bookworm\nRUN echo own > /judge\n"
TEST = """\
cat /judge 2> /dev/null || echo task
ok=0; test "$(cat out.txt /srv/made/page)" = "one
two" && test ! -e junk.txt && test ! -e /srv/other && ok=1
test "$(cat /judge 2> /dev/null)" = "$EXPECTED" || ok=0
echo $ok > /logs/verifier/reward.txt
"""


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
async def test_separate_tests_see_the_artifacts_in_their_own_image(
    docker: DockerBackend, tmp_path: Path, own: bool
) -> None:
    folder = task_folder(tmp_path) / "ask"
    (folder / "environment" / "docker-compose.yaml").unlink()
    env = f"env = {{ EXPECTED = '{'own' if own else ''}' }}\n"
    (folder / "task.toml").write_text(SEPARATE + env + ("[verifier.environment]\n" if own else ""))
    (folder / "tests" / "test.sh").write_text(TEST)
    (folder / "tests" / "Dockerfile").write_text(JUDGE)
    solve = "echo one > out.txt; mkdir -p /srv/made; echo two > /srv/made/page; touch junk.txt"
    (folder / "solution" / "solve.sh").write_text(solve)
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    grader = Grader(docker, GradeConfig(timeout_s=30.0))
    found = await check_item(grader, docker, item, 1)
    await grader.close()
    assert (found.status, found.reason) == ("passed", "")
    assert left() == ""


HOG = """\
python3 -c 'x = b"x" * (900 << 20)' || echo 0 > /logs/verifier/reward.txt
test -e /logs/verifier/reward.txt || echo 1 > /logs/verifier/reward.txt
"""


@pytest.mark.full
async def test_a_kill_for_memory_is_named_in_the_verdict(docker_image: str, tmp_path: Path) -> None:
    docker = DockerBackend(cache=tmp_path / "cache", memory_bytes=512 << 20)
    if "sandbox_memory" not in docker.capabilities:
        pytest.skip("no docker daemon: this one has no memory cgroup")
    folder = task_folder(tmp_path / "tasks") / "ask"
    (folder / "environment" / "docker-compose.yaml").unlink()
    (folder / "tests" / "test.sh").write_text(HOG)
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path / "tasks").every()
    grader = Grader(docker, GradeConfig(timeout_s=30.0))
    base = (await grader.bases.of(item.task)).files
    verdict = await grader.grade(item.task, item.oracle, {**base, "out.txt": FileEntry(content=b"x")})
    await grader.close()
    assert verdict.reason == "the tests gave 0; a process was out of memory"


KILLED = """\
import asyncio, sys
from pathlib import Path
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.docker import DockerBackend
from insitu_tasksets.live import everywhere
from insitu_tasksets.validate import check_item
from insitu_tasksets.container_plan import ContainerPlan, SideService
async def main():
    db = SideService(name="db", image="insitu-sandbox:bookworm", command=("sleep", "600"), volumes=("v:/v",))
    plan = ContainerPlan(services=(db,))
    spec = SandboxSpec(image="insitu-sandbox:bookworm", workdir="/app", container=plan.text)
    await DockerBackend(cache=Path(sys.argv[1])).create(spec)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.full
async def test_what_a_killed_process_left_is_reaped(docker: DockerBackend, tmp_path: Path) -> None:
    argv = (sys.executable, "-c", KILLED, str(tmp_path / "cache"))
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"up\n"
    child.kill()
    await child.wait()
    assert left() != ""
    await docker.reap()
    assert left() == ""


@pytest.mark.slow
async def test_a_backend_that_starts_an_image_alone_refuses_services() -> None:
    local = LocalBackend()
    spec = SandboxSpec(container=ContainerPlan(env={"A": "b"}).text)
    async with Pool([local]) as pool:
        with pytest.raises(PolicyUnsupported, match=r"^local starts a task's image alone"):
            await pool.create(spec)
