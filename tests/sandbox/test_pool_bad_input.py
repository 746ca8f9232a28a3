"""What agents and machines do to sandboxes: each a typed outcome in one line, and the neighbours live on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_rig import host_processes, open_descriptors, out, sh

from insitu.errors import SandboxLost
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool, PoolOptions

pytestmark = pytest.mark.slow


@pytest.fixture
async def pool(backend: LocalBackend) -> AsyncIterator[Pool]:
    async with Pool([LocalBackend(backend.mode, work_bytes=8 << 20)], PoolOptions(warm=0)) as pool:
        yield pool
        assert pool.live == 0
        assert pool.members[0].circuit.failures == 0, "what an agent did was held against the backend"


@contextlib.asynccontextmanager
async def neighbour(pool: Pool) -> AsyncIterator[None]:
    """A sandbox that works before and must work after, its processes untouched."""
    async with await pool.create(SandboxSpec()) as sandbox:
        process = await sandbox.spawn(["cat"])
        yield
        await process.write(b"still here\n")
        assert await process.readline(20) == b"still here\n"
        assert await out(sandbox, "echo $((6 * 7)) > f && cat f") == "42"


async def test_a_fork_bomb_is_a_timeout(pool: Pool) -> None:
    async with neighbour(pool), await pool.create(SandboxSpec(max_processes=60)) as sandbox:
        result = await sandbox.exec(["bash", "-c", "b() { b | b & }; b; sleep 60"], timeout_s=2)
        assert result.timed_out or result.exit_code != 0
        assert result.exit_code != 0
        await sandbox.kill_all()


async def test_a_full_disk_is_the_agents_failure_and_its_tree_is_still_read(pool: Pool) -> None:
    async with neighbour(pool), await pool.create(SandboxSpec()) as sandbox:
        result = await sh(sandbox, "echo kept > first; head -c 50000000 /dev/zero > fill; echo more > last")
        assert result.exit_code != 0
        assert b"No space left on device" in result.stderr
        assert (await sandbox.get_tree())["first"].content == b"kept\n"
        assert await out(sandbox, "rm fill; echo ok > last; cat last") == "ok"


async def test_endless_output_is_cut_and_costs_no_memory(pool: Pool) -> None:
    async with neighbour(pool), await pool.create(SandboxSpec()) as sandbox:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await sandbox.exec(
            ["sh", "-c", "yes out & yes err >&2"], timeout_s=2, max_output_bytes=1 << 20
        )
        assert result.timed_out
        assert result.truncated
        assert (len(result.stdout), len(result.stderr)) == (1 << 20, 1 << 20)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 << 10, f"{grown} KiB more at the peak"


async def test_an_agent_that_never_exits_is_a_timeout(pool: Pool) -> None:
    async with neighbour(pool), await pool.create(SandboxSpec()) as sandbox:
        script = "trap '' TERM INT HUP QUIT; while :; do sleep 0.05; done"
        result = await sandbox.exec(["bash", "-c", script], timeout_s=0.5)
        assert (result.timed_out, result.exit_code) == (True, -9)
        assert await out(sandbox, "echo usable") == "usable"


async def test_a_sandbox_that_dies_under_a_command_is_lost_and_says_so(pool: Pool) -> None:
    async with neighbour(pool), await pool.create(SandboxSpec()) as sandbox:
        process = await sandbox.spawn(["sleep", "858585"])
        running = asyncio.ensure_future(sandbox.exec(["sleep", "858586"], timeout_s=60))
        while not host_processes("858586"):  # noqa: ASYNC110 - another program's start has no event here
            await asyncio.sleep(0.02)
        os.kill(parent(host_processes("858586")[0]), signal.SIGKILL)
        result = await running
        assert (result.exit_code, result.timed_out) == (None, False)
        assert await process.wait(20) == -9
        with pytest.raises(SandboxLost, match="^the sandbox has ended$"):
            await sandbox.get_tree()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


NO_NAMESPACES = """
from insitu.errors import SetupError
from insitu.sandbox.local import LocalBackend
try:
    print("works:", LocalBackend().mode)
except SetupError as error:
    print(error)
"""


def test_forbidden_user_namespaces_are_one_clear_line() -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", NO_NAMESPACES]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    if "unshare:" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"user namespaces are off here already: {done.stderr.strip()}")
    said = done.stdout.strip()
    assert re.fullmatch(r"no way to isolate a process here .*", said), done.stdout + done.stderr
    assert "no user namespaces are allowed; allow some with" in said
    assert "Traceback" not in done.stderr


def mounts() -> set[str]:
    """Mount points of the kinds that sandboxes are made of; other programs mount others meanwhile."""
    lines = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {
        left.split()[4] for left, right in lines if right.split()[0] in ("tmpfs", "proc", "devpts", "mqueue")
    }


async def test_64_sandboxes_at_once_leave_nothing(backend: LocalBackend) -> None:
    await asyncio.sleep(0)
    before, mounted = open_descriptors(), mounts()
    async with Pool([LocalBackend(backend.mode)], PoolOptions(warm=0)) as pool:
        sandboxes = await asyncio.gather(*(pool.create(SandboxSpec()) for _ in range(64)))
        assert len(set(map(id, sandboxes))) == pool.live == 64
        said = await asyncio.gather(
            *(out(sandbox, f"echo {n} > f; cat f") for n, sandbox in enumerate(sandboxes))
        )
        assert said == [str(number) for number in range(64)]
        await asyncio.gather(*(sandbox.spawn(["sleep", "848484"]) for sandbox in sandboxes))
        for _ in range(300):  # a spawned process is there a moment before it is `sleep`
            if len(host_processes("848484")) == 64:
                break
            await asyncio.sleep(0.1)
        assert len(host_processes("848484")) == 64
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        assert pool.live == 0
    assert host_processes("848484") == []
    await asyncio.sleep(0.05)
    assert open_descriptors() == before
    assert mounts() <= mounted


OWNER = """
import asyncio, sys
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool
async def main():
    async with Pool([LocalBackend(sys.argv[1])]) as pool:
        sandboxes = [await pool.create(SandboxSpec()) for _ in range(4)]
        for sandbox in sandboxes:
            for _ in range(2):
                await sandbox.spawn(["sleep", "838383"])
        print("up", flush=True)
        while True:  # so that the kill also meets sandboxes that are being made and ended
            await asyncio.gather(*(turn(pool) for _ in range(4)))
async def turn(pool):
    async with await pool.create(SandboxSpec(env={"X": "838383"})) as sandbox:
        await sandbox.exec(["true"], timeout_s=20)
asyncio.run(main())
"""


@pytest.mark.full
async def test_after_kill_9_of_the_owner_nothing_is_left_at_the_next_start(backend: LocalBackend) -> None:
    mounted = mounts()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for wait_s in (0.0, 0.07):
        command = [sys.executable, "-c", OWNER, backend.mode]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)  # noqa: ASYNC220
        assert owner.stdout is not None
        with owner, owner.stdout:
            try:
                assert await asyncio.to_thread(owner.stdout.readline) == "up\n"
                async with asyncio.timeout(60):
                    while len(host_processes("838383")) < 8:  # noqa: ASYNC110 - they have no event here
                        await asyncio.sleep(0.02)
                started = descendants(owner.pid)
                await asyncio.sleep(wait_s)
                started |= descendants(owner.pid)
            finally:
                owner.kill()
        assert len(started) > 8
        async with Pool([LocalBackend(backend.mode)]) as pool, await pool.create(SandboxSpec()) as sandbox:
            assert await out(sandbox, "echo on") == "on"
            async with asyncio.timeout(60):
                while alive(started):  # noqa: ASYNC110 - strangers' ends have no event here
                    await asyncio.sleep(0.02)
            assert host_processes("838383") == []
    assert mounts() <= mounted


def alive(pids: set[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def descendants(root: int) -> set[int]:
    found, waiting = set[int](), [root]
    while waiting:
        with contextlib.suppress(OSError):
            pid = waiting.pop()
            inner = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found |= {int(child) for child in inner}
            waiting += [int(child) for child in inner]
    return found
