"""Running, stopping and killing processes in a sandbox, in both local modes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sandbox_rig import host_processes, open_descriptors, out, python, sh

from insitu.errors import SandboxLost
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox

pytestmark = pytest.mark.slow

DAEMON = "(setsid sh -c 'setsid sleep {n} & ' >/dev/null 2>&1 &) ; sleep 0.05"


async def living(sandbox: LocalSandbox, word: str) -> int:
    """Processes of the sandbox whose command line holds `word` (the searching shell does not count
    itself)."""
    pattern = f"[{word[0]}]{word[1:]}"
    return int(
        (await sh(sandbox, f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^{pattern}$'")).stdout
    )


def first_process(sandbox: LocalSandbox) -> int:
    """Host pid of the sandbox's PID 1."""
    outer = sandbox._process.pid
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


async def test_killed_work_cannot_go_on_to_exit_zero(sandbox: LocalSandbox) -> None:
    for _ in range(10):
        running = asyncio.create_task(sh(sandbox, "sleep 60; exit 0"))
        await asyncio.sleep(0.02)
        await sandbox.kill_all()
        assert (await running).exit_code == -9
        late = await sh(sandbox, "sleep 60; exit 0", timeout_s=0.02)
        assert (late.exit_code, late.timed_out) == (-9, True)


async def test_close_leaves_nothing(backend: LocalBackend) -> None:
    before = open_descriptors()
    sandbox = await backend.create(SandboxSpec())
    await sandbox.spawn(["sleep", "919293"])
    await sh(sandbox, DAEMON.format(n=919293))
    assert len(host_processes("919293")) == 2
    await sandbox.close()
    await sandbox.close()
    assert host_processes("919293") == []
    assert sandbox._process.poll() is not None
    await asyncio.sleep(0)
    assert open_descriptors() == before
    with pytest.raises(SandboxLost):
        await sandbox.exec(["true"], timeout_s=1)
    with pytest.raises(SandboxLost):
        await sandbox.get_tree()


async def test_cancelled_exec_kills_and_cancelled_close_finishes(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    task = asyncio.create_task(sh(sandbox, "sleep 929394"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await living(sandbox, "929394") == 0
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await sandbox.close()
    assert sandbox._process.poll() is not None


async def test_a_sandbox_killed_from_outside_is_lost_not_stuck(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as sandbox:
        process = await sandbox.spawn(["sleep", "939495"])
        running = asyncio.create_task(sh(sandbox, "sleep 939495"))
        await asyncio.sleep(0.1)
        os.kill(first_process(sandbox), signal.SIGKILL)
        result = await asyncio.wait_for(running, 5)
        assert result.exit_code is None
        assert await process.wait(5) != 0
        with pytest.raises(SandboxLost):
            await sandbox.kill_all()
    assert host_processes("939495") == []


async def test_system_v_memory_does_not_outlive_a_wipe(sandbox: LocalSandbox) -> None:
    make = "import ctypes; print(ctypes.CDLL(None).shmget(4711, 4096, 0o1666))"
    assert int(await python(sandbox, make)) >= 0
    assert (await out(sandbox, "wc -l < /proc/sysvipc/shm")) == "2"
    await sandbox.wipe()
    assert (await out(sandbox, "wc -l < /proc/sysvipc/shm")) == "1"
