"""A sandbox of an image that is set up as root, and that no root process remains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_rig import out, sh

from insitu.errors import PolicyUnsupported, SandboxStartError
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.base_tree import set_up
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool
from insitu.types import GradingPlan, Setup, task_hash

ROOT = (
    "test $(id -u) = 0 && test $HOME = /root",
    "cp /bin/sh /usr/local/bin/rootsh && chmod 6755 /usr/local/bin/rootsh",
    "echo 1 > made; mkdir -p /opt/tool && chown 4321:4321 /opt/tool && chmod 700 /opt/tool",
    "setsid sleep 4245 </dev/null >/dev/null 2>&1 & sleep 0.2",
)
STATUS = "grep -hE '^(Cap|Uid|Gid|Groups)' /proc/self/status /proc/1/status | tr -s '\\t ' ' ' | sort -u"


@pytest.fixture
async def pool(docker_image: str, tmp_path: Path) -> AsyncIterator[Pool]:
    async with Pool([DockerBackend(docker_image, cache=tmp_path)]) as made:
        yield made


def spec(image: str) -> SandboxSpec:
    return SandboxSpec(image=image, workdir="/srv", root_setup=True, label="test")


@pytest.mark.full
async def test_root_sets_up_and_is_gone(pool: Pool, docker_image: str) -> None:
    setup = Setup(image=docker_image, workdir="/srv", root_commands=ROOT, commands=("id -u > who",))
    async with await pool.create(spec(docker_image)) as sandbox:
        await set_up(sandbox, setup)
        assert await out(sandbox, "cat made who; echo 2 > made; cat made") == "1\n1000\n2"
        assert (await out(sandbox, STATUS)).splitlines() == [
            *(f"Cap{name}: 0000000000000000" for name in ("Amb", "Bnd", "Eff", "Inh", "Prm")),
            "Gid: 1000 1000 1000 1000",
            "Groups: ",
            "Uid: 1000 1000 1000 1000",
        ]
        assert (await out(sandbox, "rootsh -p -c 'id -u; id -g'")).split() == ["1000", "1000"]
        for refused in ("echo x > /usr/local/bin/y", "ls /opt/tool", "chown 0 made"):
            assert (await sh(sandbox, refused)).exit_code != 0, refused
        assert (
            await sh(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep 'sleep 424[5]'")
        ).exit_code == 1
        again = await sandbox.exec_as_root(["id"], timeout_s=10)
        assert (again.exit_code, again.stderr) == (126, b"root has ended\n")
        await sandbox.kill_all()
        assert await out(sandbox, "id -u") == "1000"


@pytest.mark.full
async def test_any_other_command_ends_root(pool: Pool, docker_image: str) -> None:
    async with await pool.create(spec(docker_image)) as sandbox:
        assert await out(sandbox, "id -u") == "1000"
        assert (await sandbox.exec_as_root(["id"], timeout_s=10)).exit_code == 126
    async with await pool.create(spec(docker_image)) as sandbox:
        slow = await sandbox.exec_as_root(["sh", "-c", "setsid sleep 60 & sleep 60"], timeout_s=0.5)
        assert (slow.timed_out, slow.exit_code) == (True, -9)
        assert await out(sandbox, "id -u; cat /proc/[0-9]*/comm | grep -c sleep || true") == "1000\n0"
    async with await pool.create(spec(docker_image)) as sandbox:
        with pytest.raises(SandboxStartError, match="root setup command 2 ended with 3: no such luck"):
            await set_up(sandbox, Setup(root_commands=("true", "echo no such luck >&2; exit 3")))


@pytest.mark.slow
async def test_sandboxes_without_root_are_refused(backend: LocalBackend) -> None:
    with pytest.raises(PolicyUnsupported, match="has no root"):
        await backend.create(SandboxSpec(root_setup=True))
    async with Pool([backend]) as local, await local.create(SandboxSpec()) as sandbox:
        with pytest.raises(PolicyUnsupported, match="has no root"):
            await set_up(sandbox, Setup(root_commands=("true",)))


def test_a_task_that_needs_no_root_keeps_its_name() -> None:
    plan, plain = GradingPlan(), Setup(image="i", commands=("c",))
    named = task_hash("p", {}, plan, plain)
    assert named == "b88638ab04ffd1a4664042aeeea125b85b8d43fd23a7026bd40bba370471530e"
    others = [Setup(image="i", commands=("c",), root_commands=text) for text in (("r",), ("r", "s"))]
    assert len({named, *(task_hash("p", {}, plan, setup) for setup in others)}) == 3
