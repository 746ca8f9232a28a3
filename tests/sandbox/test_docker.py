"""What only the docker backend has: a daemon that may be missing, images, containers that a crash leaves."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from sandbox_rig import out, sh

from insitu.errors import (
    BackendTimeout,
    ImageMissing,
    ImageUnavailable,
    PolicyUnsupported,
    SandboxError,
    SandboxLost,
    SandboxStartError,
    SetupError,
)
from insitu.sandbox import bundled_python as sandbox_python
from insitu.sandbox import docker_cli
from insitu.sandbox import docker_sandbox as docker_sandbox
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.docker_cli import Cli, classify
from insitu.sandbox.docker_image import Images
from insitu.sandbox.process_owner import owner
from insitu.types import FileEntry
from tests.fakes.docker_daemon import sweep

NO_DAEMON = "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"

# No daemon needed


def test_no_program_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"^docker is not installed: put docker or podman on PATH.*$"):
        DockerBackend(cache=tmp_path)


def fake_docker(folder: Path, script: str) -> str:
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
def test_no_daemon_is_one_clear_line(tmp_path: Path) -> None:
    script = (
        "echo 'Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?' >&2; exit 1"
    )
    with pytest.raises(SetupError, match=r"^docker's daemon does not answer: Cannot connect [^\n]*$"):
        DockerBackend(cache=tmp_path, program=fake_docker(tmp_path, script))


def test_a_daemon_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(SetupError, match="must run on this machine"):
        DockerBackend(cache=tmp_path, program=fake_docker(tmp_path, "exit 1"))


INFO = '{"OSType": "linux", "MemoryLimit": %s, "PidsLimit": %s, "SwapLimit": false, "Runtimes": {"runc": {}}}'


@pytest.mark.slow
async def test_capabilities_are_what_the_daemon_offers(tmp_path: Path) -> None:
    all_of_them = fake_docker(tmp_path, f"echo '{INFO % ('true', 'true')}'")
    assert "resource_limits" in DockerBackend("i", cache=tmp_path, program=all_of_them).capabilities
    none = DockerBackend(
        "i", cache=tmp_path, program=fake_docker(tmp_path, f"echo '{INFO % ('false', 'false')}'")
    )
    assert "resource_limits" not in none.capabilities
    with pytest.raises(PolicyUnsupported, match="pids cgroup is missing"):
        await none.create(SandboxSpec(max_processes=10))
    with pytest.raises(SetupError, match=r"no runtime 'runsc'; it has runc"):
        DockerBackend("i", cache=tmp_path, program=all_of_them, runtime="runsc")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("docker: Error response from daemon: No such image: sha256:1.", ImageMissing),
        ("Error response from daemon: manifest for a/b:c not found: manifest unknown", ImageMissing),
        ("Error response from daemon: pull access denied for a, repository does not exist", ImageMissing),
        ("Error: initializing source docker://a: reading manifest: manifest unknown", ImageMissing),
        (
            'Error response from daemon: Get "https://r/v2/": dial tcp: lookup r: no such host',
            SandboxStartError,
        ),
        ('Error response from daemon: Get "https://r/v2/": context deadline exceeded', SandboxStartError),
        (
            "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
            SandboxStartError,
        ),
        ("no space left on device", SandboxStartError),
        ("", SandboxStartError),
    ],
)
def test_failures_are_told_apart(said: str, kind: type[SandboxError]) -> None:
    error = classify("docker", "run", said.encode())
    assert type(error) is kind
    assert "\n" not in str(error)
    assert error.infra


@pytest.mark.slow
def test_the_lent_python_needs_nothing_of_its_sandbox(tmp_path: Path) -> None:
    folder = sandbox_python.stage_python(tmp_path)
    assert sandbox_python.stage_python(tmp_path) == folder
    assert [path for path in folder.rglob("*") if path.is_symlink()] == []
    assert {path.stat().st_mode & 0o022 for path in folder.rglob("*")} == {0}


@pytest.mark.slow
async def test_downloads_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docker_cli, "ATONCE", 1)
    monkeypatch.setattr(docker_cli, "PULLS", 1)
    script = f"""case $1 in
        pull) echo x >> {tmp_path}/pulls; until [ -e {tmp_path}/done ]; do sleep 0.05; done;;
        *) echo removed;;
    esac"""
    cli = Cli(fake_docker(tmp_path, script))
    downloads = [asyncio.ensure_future(cli.run(["pull", str(n)], timeout_s=60)) for n in range(2)]
    assert (await cli.run(["rm", "a"], timeout_s=60))[1] == b"removed\n"
    assert not any(pull.done() for pull in downloads)
    with pytest.raises(BackendTimeout, match=r"^docker pull did not end within 0\.2 s$"):
        await cli.run(["pull", "third"], timeout_s=0.2)
    (tmp_path / "done").touch()
    assert [code for code, *_ in await asyncio.gather(*downloads)] == [0, 0]
    assert (tmp_path / "pulls").read_text() == "x\nx\n", "the third waited for its turn under its deadline"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pull", "kind"),
    [
        ("echo 'Get \"https://r/v2/\": dial tcp: connection refused' >&2; exit 1", ImageUnavailable),
        ("echo 'unauthorized: authentication required' >&2; exit 1", ImageUnavailable),
        ("sleep 60", ImageUnavailable),
        ("echo 'manifest for a:1 not found: manifest unknown' >&2; exit 1", ImageMissing),
        (f"echo '{NO_DAEMON}' >&2; exit 1", SandboxStartError),
    ],
)
async def test_what_a_failed_download_blames(pull: str, kind: type[SandboxError], tmp_path: Path) -> None:
    script = f"case $1 in pull) {pull};; *) echo 'No such image: a:1' >&2; exit 1;; esac"
    images = Images(Cli(fake_docker(tmp_path, script)), tmp_path, 1000, 1000, pull_timeout_s=1)
    with pytest.raises(SandboxError, match=r"^image a:1: [^\n]+$") as caught:
        await images.get("a:1")
    assert type(caught.value) is kind


DAEMON = """
echo "$@" >> {log}
case $1 in
  info) echo '{info}';;
  image) echo '[{{"Id": "sha256:12"}}]';;
  create|run) [ -e {fast} ] || exec sleep 60; echo 'no cgroup' >&2; [ $1 = create ];;
  cp) exit 1;;
esac
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DockerBackend:
    """A daemon that executes no command, and answers slowly before `fast` is there."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    script = DAEMON.format(log=tmp_path / "log", fast=tmp_path / "fast", info=INFO % ("true", "true"))
    (tmp_path / "fast").touch()
    return DockerBackend(
        "a:1", cache=tmp_path / "c", program=fake_docker(tmp_path, script), start_timeout_s=1
    )


def calls(folder: Path, verb: str) -> list[str]:
    return [line for line in (folder / "log").read_text().splitlines() if line.split()[0] == verb]


@pytest.mark.slow
async def test_what_the_host_lacks_is_a_typed_failure_that_leaves_nothing(
    slow: DockerBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await slow.image_digest("a:1")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no/such/folder")
    with pytest.raises(SandboxStartError, match="^start a docker sandbox: .*No such file"):
        await slow.create(SandboxSpec())
    parent = tmp_path / "tmp"
    monkeypatch.setattr("insitu.storage.temp_dirs.socket_parent", lambda: parent)

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("insitu.sandbox.docker.socket.socket", none_left)
    with pytest.raises(SandboxStartError, match="Too many open files"):
        await slow.create(SandboxSpec())
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
async def test_a_container_made_too_late_is_removed_too(
    slow: DockerBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_sandbox, "LATE_S", 0.1)
    await slow.image_digest("a:1")
    (look,) = calls(tmp_path, "create")
    assert f"--label insitu.owner={slow._owner}" in look
    with pytest.raises(SandboxStartError, match="no cgroup"):
        await slow.create(SandboxSpec())
    (tmp_path / "fast").unlink()
    (tmp_path / "log").unlink()
    with pytest.raises(BackendTimeout, match=r"^docker run did not end within 1 s$"):
        await slow.create(SandboxSpec())
    name = calls(tmp_path, "run")[0].split("--name ")[1].split()[0]
    async with asyncio.timeout(20):
        # Not only until it is called: a loop that ends in the middle of a spawn waits for its whole deadline.
        await asyncio.gather(*docker_sandbox._late)
    assert calls(tmp_path, "rm") == [f"rm -f -v {name}"] * 2


@pytest.mark.slow
def test_what_killed_tests_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    mark = owner(dead.pid)
    dead.wait()
    for name, whose in (("dead", mark), ("mine", owner())):
        (tmp_path / f"insitu-dockerd-{name}" / "data").mkdir(parents=True)
        (tmp_path / f"insitu-dockerd-{name}" / "owner").write_text(whose)
    (tmp_path / "insitu-dockerd-unmarked").mkdir()
    assert sweep(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "insitu-dockerd-mine",
        "insitu-dockerd-unmarked",
    ]


# With a daemon


@pytest.fixture
def docker(docker_image: str, tmp_path: Path) -> DockerBackend:
    return DockerBackend(docker_image, cache=tmp_path / "cache")


def docker_says(*arguments: str, stdin: bytes = b"") -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, check=True, timeout=60)
    return done.stdout.decode()


def containers() -> list[str]:
    return docker_says("ps", "--all", "--quiet", "--filter", "label=insitu.sandbox=test").split()


@pytest.mark.full
async def test_an_image_that_is_nowhere_and_a_registry_that_is_down(docker: DockerBackend) -> None:
    with pytest.raises(ImageUnavailable, match=r"^image 127\.0\.0\.1:9/none:1: [^\n]*$"):
        await docker.create(SandboxSpec(image="127.0.0.1:9/none:1"))
    for nonsense in ("", "-v", "UPPER/Case:x y"):
        if nonsense:
            with pytest.raises(ImageMissing):
                await docker.create(SandboxSpec(image=nonsense))


@pytest.mark.full
async def test_a_sandbox_can_be_made_of_an_image_with_nothing_in_it(docker: DockerBackend) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo("srv/data/given.txt")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"given"))
    docker_says("import", "-", "insitu-test-empty:1", stdin=archive.getvalue())
    spec = SandboxSpec(
        image="insitu-test-empty:1", workdir="/srv/data", files={"own": FileEntry(content=b"1")}
    )
    async with await docker.create(spec) as sandbox:
        assert (await sandbox.exec(["/bin/sh"], timeout_s=20)).exit_code == 127
        assert {path: entry.content for path, entry in (await sandbox.get_tree()).items()} == {
            "given.txt": b"given",
            "own": b"1",
        }
        with pytest.raises(SandboxError, match="cannot be wiped"):
            await sandbox.wipe()
    assert (await docker.image_digest("insitu-test-empty:1")).startswith("sha256:")


@pytest.mark.full
async def test_a_spec_without_a_work_folder_has_the_images(
    docker: DockerBackend, docker_image: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {docker_image}\nWORKDIR /srv/given\nRUN touch here\n")
    docker_says("build", "--quiet", "--network", "none", "--tag", "insitu-test-placed:1", str(tmp_path))
    async with await docker.create(SandboxSpec(image="insitu-test-placed:1", workdir="")) as sandbox:
        assert sandbox.workdir == "/srv/given"
        assert await out(sandbox, "pwd; ls; touch new && echo ok") == "/srv/given\nhere\nok"
        assert set(await sandbox.get_tree()) == {"here", "new"}
    with pytest.raises(PolicyUnsupported, match="has no WORKDIR, and the whole system is no work folder"):
        await docker.create(SandboxSpec(image=docker_image, workdir=""))


@pytest.mark.full
async def test_what_an_image_holds_belongs_to_the_boxs_user(docker: DockerBackend, docker_image: str) -> None:
    async with await docker.create(SandboxSpec(image=docker_image, workdir="/usr/share")) as sandbox:
        assert await out(sandbox, "find . ! -user agent | wc -l; echo x > new && cat new") == "0\nx"
        assert (await sh(sandbox, "echo x > /usr/bin/new")).exit_code != 0


@pytest.mark.full
async def test_root_in_a_sandbox_has_no_power_over_files_of_another(
    docker_image: str, tmp_path: Path
) -> None:
    backend = DockerBackend(docker_image, cache=tmp_path, user="0:0")
    async with await backend.create(SandboxSpec(image=docker_image, workdir="/root")) as sandbox:
        assert await out(
            sandbox, "id -u; touch /usr/bin/new own && echo ok; cat /proc/sys/kernel/hostname"
        ) == ("0\nok\nsandbox")
        await sandbox.lay({"t/hidden.py": FileEntry(content=b"true")}, owner="root")
        for script in ("echo x > t/hidden.py", "rm -f t/hidden.py", "mv t u", "chmod 777 t", "chown 0 t"):
            assert (await sh(sandbox, script)).exit_code != 0, script
        assert (
            await out(sandbox, "cat t/hidden.py; grep -c '^Cap.*[1-9a-f]$' /proc/self/status || true")
            == "true0"
        )
        for script in ("mount -t tmpfs none /mnt", "mknod /dev/x b 8 0", "kill -9 1; kill -9 1; exit 1"):
            assert (await sh(sandbox, script)).exit_code != 0, script
        assert await out(sandbox, "echo alive") == "alive"


@pytest.mark.full
async def test_a_container_killed_from_outside_is_lost_and_not_exit_zero(docker: DockerBackend) -> None:
    async with await docker.create(SandboxSpec(label="test")) as sandbox:
        running = asyncio.create_task(sh(sandbox, "sleep 60"))
        await asyncio.sleep(0.1)
        for name in containers():
            docker_says("kill", name)
        assert (await asyncio.wait_for(running, 20)).exit_code is None
        with pytest.raises(SandboxLost):
            await sandbox.exec(["true"], timeout_s=5)
    assert containers() == []


@pytest.mark.full
async def test_a_memory_hog_dies_and_its_sandbox_lives(docker_image: str, tmp_path: Path) -> None:
    backend = DockerBackend(docker_image, cache=tmp_path, memory_bytes=512 << 20)
    assert "resource_limits" in backend.capabilities, "this daemon has no memory cgroup: nothing to test with"
    async with await backend.create(SandboxSpec()) as sandbox:
        hog = "import os, time\nfor _ in range(3): os.fork()\n"
        hog += "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(60)"
        result = await sandbox.exec(["python3", "-c", hog], timeout_s=10)
        assert result.exit_code not in (0, None)
        assert result.out_of_memory
        await sandbox.kill_all()
        assert await out(sandbox, "echo alive") == "alive"


OWNER = """
import asyncio, sys
from pathlib import Path
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.docker import DockerBackend
async def main():
    backend = DockerBackend(sys.argv[1], cache=Path(sys.argv[2]))
    sandbox = await backend.create(SandboxSpec(label="test"))
    await sandbox.spawn(["sleep", "949798"])
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.full
async def test_no_sandbox_outlives_a_killed_owner(
    docker: DockerBackend, docker_image: str, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", OWNER, docker_image, str(tmp_path / "cache")]
    host = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    assert host.stdout is not None
    assert await host.stdout.readline() == b"up\n"
    assert len(containers()) == 1
    host.send_signal(signal.SIGKILL)
    await host.wait()
    for _ in range(100):
        if not containers():
            break
        await asyncio.sleep(0.1)
    assert containers() == []


@pytest.mark.full
async def test_reaping_takes_what_dead_owners_left_and_nothing_else(docker: DockerBackend) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=subprocess.PIPE)
    dead = DockerBackend(docker._image, cache=docker._python.parent)
    dead._owner = dead._owner.replace(f"-{os.getpid()}-", f"-{child.pid}-")
    await child.wait()
    left, mine = await dead.create(SandboxSpec(label="test")), await docker.create(SandboxSpec(label="test"))
    try:
        assert await docker.reap() == 1
        assert len(containers()) == 1
        assert await out(mine, "echo alive") == "alive"
        assert await docker.reap() == 0
    finally:
        await left.close()
        await mine.close()
    assert containers() == []


STARTING = """
import asyncio, os, sys
from pathlib import Path
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.docker_image import Image, Images
async def image(self, reference):
    return Image(id="i", digest="d", etc=Path(sys.argv[2]), env={}, workdir="/")
Images.get = image
backend = DockerBackend("i", cache=Path(sys.argv[2]), program=sys.argv[1])
asyncio.run(backend.create(SandboxSpec()))
"""


@pytest.mark.slow
async def test_the_folder_of_a_sandbox_that_was_being_started_by_a_dead_owner_is_removed(
    tmp_path: Path,
) -> None:
    info = INFO % ("true", "true")
    script = f"case \"$1\" in run) kill -9 $PPID;; ps) ;; *) echo '{info}';; esac"
    arguments = (fake_docker(tmp_path, script), str(tmp_path))
    with tempfile.TemporaryDirectory() as places:  # a short path: sockets lie there
        env = {**os.environ, "TMPDIR": places}
        dead = await asyncio.create_subprocess_exec(sys.executable, "-c", STARTING, *arguments, env=env)
        assert await dead.wait() == -signal.SIGKILL
        assert len(os.listdir(places)) == 1  # noqa: PTH208
        reap = STARTING.replace("create(SandboxSpec())", "reap()")
        reaper = await asyncio.create_subprocess_exec(sys.executable, "-c", reap, *arguments, env=env)
        assert await reaper.wait() == 0
        assert os.listdir(places) == []  # noqa: PTH208


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ('"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "xfs"]]', True),
        ('"Driver": "btrfs", "DriverStatus": [["Btrfs", ""]]', True),
        ('"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]', False),
        ('"Driver": "vfs", "DriverStatus": null', False),
    ],
)
def test_a_cap_on_the_disk_takes_storage_with_quotas(tmp_path: Path, said: str, fits: bool) -> None:
    info = INFO % ("true", "true")
    program = fake_docker(tmp_path, f"echo '{info[:-1]}, {said}}}'")
    DockerBackend("i", cache=tmp_path, program=program)
    if fits:
        DockerBackend("i", cache=tmp_path, program=program, disk_bytes=1 << 20)
    else:
        with pytest.raises(SetupError, match=r"^sandbox.disk_mb needs storage with quotas"):
            DockerBackend("i", cache=tmp_path, program=program, disk_bytes=1 << 20)
