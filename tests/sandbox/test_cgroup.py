"""Control groups of local sandboxes: made, entered, counted, removed, reaped; and machines that have none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_rig import out, python, sh

from insitu.sandbox import cgroup
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.cgroup import Cgroups, CgroupSupport
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool

pytestmark = pytest.mark.slow

NONE = CgroupSupport(cgroups=None, why="switched off")


@pytest.fixture
def cgroups(backend: LocalBackend) -> Cgroups:
    if backend.cgroups is None:
        pytest.skip(f"no control groups here: {backend.why_no_cgroups}")
    return backend.cgroups


async def test_a_sandbox_has_a_group_for_as_long_as_it_lives(backend: LocalBackend, cgroups: Cgroups) -> None:
    before = cgroups.names()
    async with await backend.create(SandboxSpec()) as sandbox:
        (name,) = cgroups.names() - before
        assert {
            line.split(":", 2)[2] for line in (await out(sandbox, "cat /proc/self/cgroup")).splitlines()
        } == {"/"}
        for parent in cgroups.parents:
            inside = (parent / name / "cgroup.procs").read_text().split()
            assert len(inside) == cgroup.OUTSIDE
        await sh(sandbox, "setsid sleep 4243 >/dev/null 2>&1 & sleep 0.1")
    assert cgroups.names() == before


async def test_what_processes_share_and_files_in_memory_count(
    backend: LocalBackend, cgroups: Cgroups
) -> None:
    small = LocalBackend(backend.mode, memory_bytes=96 << 20)
    async with await small.create(SandboxSpec()) as sandbox:
        shared = "import mmap; m = mmap.mmap(-1, 128 << 20)\nfor i in range(0, 128 << 20, 4096): m[i] = 1"
        result = await sandbox.exec(["python3", "-c", shared], timeout_s=20)
        assert (result.exit_code, result.out_of_memory) == (-9, True)
        half = ["python3", "-c", "x = bytearray(60 << 20)"]
        assert (await sandbox.exec(half, timeout_s=20)).exit_code == 0
        assert not (await sh(sandbox, "head -c 60000000 /dev/zero > /tmp/big")).out_of_memory
        result = await sandbox.exec(half, timeout_s=20)
        assert (result.exit_code, result.out_of_memory) == (-9, True)
        await sh(sandbox, "rm /tmp/big")
        assert (await sandbox.exec(half, timeout_s=20)).exit_code == 0


async def test_a_fork_bomb_is_bounded_by_the_group_alone(
    backend: LocalBackend, cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.sandbox.local._kernel", lambda: (5, 10))
    monkeypatch.setattr("insitu.sandbox.local.has_own_users", lambda: False)
    old = LocalBackend(backend.mode)
    assert "resource_limits" in old.capabilities
    many = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError:
    print(n)
"""
    async with await old.create(SandboxSpec(max_processes=30)) as sandbox:
        assert int(await python(sandbox, many)) == 29
        await sandbox.kill_all()
        assert await out(sandbox, "echo alive") == "alive"


async def test_sandboxes_at_once_leave_no_group(backend: LocalBackend, cgroups: Cgroups) -> None:
    before = cgroups.names()
    sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(8)))
    assert len(cgroups.names() - before) == 8
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    assert cgroups.names() == before


def _of_another(cgroups: Cgroups, name: str) -> set[str]:
    return cgroups.names(name.removeprefix(cgroup.PREFIX).rpartition("-")[0])


OWNER = """
import asyncio, sys
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
async def main():
    backend = LocalBackend(sys.argv[1])
    async with await backend.create(SandboxSpec()) as sandbox:
        await sandbox.spawn(["sleep", "959697"])
        print(*backend.cgroups.names(), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_next_start_removes_what_a_killed_owner_left(
    backend: LocalBackend, cgroups: Cgroups
) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OWNER, backend.mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as host:  # noqa: ASYNC220
        assert host.stdout is not None
        name = host.stdout.readline().strip()
        assert name.startswith(cgroup.PREFIX)
        cgroups.reap()
        assert name in _of_another(cgroups, name), "its owner lives"
        host.send_signal(signal.SIGKILL)
    assert name in _of_another(cgroups, name)
    async with Pool([backend]) as pool:
        assert pool.reaped >= 1
    assert name not in _of_another(cgroups, name)
    assert not any((parent / name).exists() for parent in cgroups.parents)


def test_what_will_not_end_is_killed_with_its_group(cgroups: Cgroups) -> None:
    group = cgroups.make(64 << 20, 10)
    with subprocess.Popen(group.command(["/bin/sleep", "60"])) as process:
        deadline = time.monotonic() + 5
        while not all((parent / group.name / "cgroup.procs").read_text() for parent in cgroups.parents):
            assert time.monotonic() < deadline
        assert not group.try_remove()
        group.end()
        assert process.wait(5) == -9
    assert group.name not in cgroups.names()


async def test_without_groups_the_limits_of_processes_stay(backend: LocalBackend) -> None:
    plain = LocalBackend(backend.mode, memory_bytes=64 << 20, cgroups=lambda: NONE)
    assert plain.why_no_cgroups == "switched off"
    assert backend.capabilities - plain.capabilities <= {"sandbox_memory"}
    assert await plain.reap() == 0
    async with await plain.create(SandboxSpec(memory_bytes=100 << 20)) as sandbox:
        result = await sandbox.exec(["python3", "-c", "x = bytearray(200 << 20)"], timeout_s=20)
        assert (result.exit_code, result.out_of_memory) == (1, False)
        assert b"MemoryError" in result.stderr
        assert (await sandbox.exec(["python3", "-c", "x = bytearray(80 << 20)"], timeout_s=20)).exit_code == 0


async def test_groups_that_cannot_be_used_are_not(backend: LocalBackend, tmp_path: Path) -> None:
    false = Cgroups(version=1, parents=(tmp_path, tmp_path / "missing"), roots=(tmp_path,))
    plain = LocalBackend(backend.mode, cgroups=lambda: CgroupSupport(cgroups=false))
    assert plain.cgroups is None
    assert plain.why_no_cgroups.startswith("no sandbox starts in one: ")
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240
    async with await plain.create(SandboxSpec()) as sandbox:
        assert await out(sandbox, "echo ok") == "ok"


def test_what_a_machine_says_of_its_groups() -> None:
    v1 = "30 24 0:26 /docker/a /sys/fs/cgroup/{0} ro,nosuid - cgroup cgroup rw,{0}\n"
    v2 = "31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    mounts = cgroup._mounts(v1.format("memory") + v1.format("cpu") + v1.format("pids") + v2)
    assert [mount[0] for mount in mounts] == ["memory", "pids", ""]
    paths = cgroup._paths("9:cpu,cpuacct:/docker/a\n4:memory:/docker/a/b\n1:name=systemd:/\n0::/x\n")
    assert paths["memory"] == "/docker/a/b"
    assert paths[""] == "/x"
    assert cgroup._own(mounts[0], "/docker/a/b") == Path("/sys/fs/cgroup/memory/b")
    for outside in ("/docker", "/docker/a/../b"):
        with pytest.raises(OSError, match="outside"):
            cgroup._own(mounts[0], outside)
    assert cgroup.look([], {}).why == "no control groups with memory and pids"
    assert cgroup.look(mounts[:2], {"memory": "/", "pids": "/"}).why.startswith(
        "v1: the group of this process is outside"
    )


def test_v2_is_used_only_where_it_is_ours(tmp_path: Path) -> None:
    """The kernel's part is in docs/internals/sandboxes.md: this looks at the reasons."""
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    mounts, paths = [("", tmp_path, "/")], {"": "/"}
    assert "no memory controller; start with `systemd-run" in cgroup.look(mounts, paths).why
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    assert "no write access" in cgroup.look(mounts, paths).why
    (tmp_path / "cgroup.subtree_control").write_text("")
    assert cgroup.look(mounts, paths).cgroups is None
