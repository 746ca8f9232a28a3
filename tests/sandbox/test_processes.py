"""Running, stopping and killing processes in a box, in both local modes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from sandbox_rig import host_processes, open_descriptors, out, python, sh

from whet.errors import SandboxError, SandboxLost
from whet.sandbox.base import SandboxSpec
from whet.sandbox.local import LocalBackend, LocalSandbox

DAEMON = "(setsid sh -c 'setsid sleep {n} & ' >/dev/null 2>&1 &) ; sleep 0.05"


async def living(box: LocalSandbox, word: str) -> int:
    """Processes of the box whose command line holds `word` (the searching shell does not count itself)."""
    pattern = f"[{word[0]}]{word[1:]}"
    return int((await sh(box, f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^{pattern}$'")).stdout)


def first_process(box: LocalSandbox) -> int:
    """Host pid of the box's PID 1."""
    outer = box._process.pid
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


async def test_exec_reports_what_happened(box: LocalSandbox) -> None:
    result = await box.exec(
        ["sh", "-c", "cat; echo $A; pwd; echo problem >&2; exit 7"],
        timeout_s=5,
        stdin=b"in\x00put\n",
        env={"A": "b c"},
        cwd="/tmp",
    )
    assert result.exit_code == 7
    assert result.stdout == b"in\x00put\nb c\n/tmp\n"
    assert result.stderr == b"problem\n"
    assert not result.timed_out
    assert not result.truncated


async def test_exec_takes_large_input_and_arguments(box: LocalSandbox) -> None:
    data = os.urandom(3 << 20)
    result = await box.exec(["wc", "-c"], timeout_s=10, stdin=data)
    assert int(result.stdout) == len(data)
    long = "x" * 100_000
    assert (await box.exec(["printf", "%s%s%s", long, long, long], timeout_s=10)).stdout.count(
        b"x"
    ) == 300_000


async def test_missing_command_and_folder_are_ordinary_failures(box: LocalSandbox) -> None:
    missing = await box.exec(["no-such-command"], timeout_s=5)
    assert (missing.exit_code, b"no-such-command" in missing.stderr) == (127, True)
    assert (await box.exec(["true"], timeout_s=5, cwd="/nowhere")).exit_code == 126
    with pytest.raises(SandboxError):
        await box.exec([], timeout_s=5)
    with pytest.raises(SandboxError, match="NUL"):
        await box.exec(["echo", "a\0b"], timeout_s=5)


async def test_output_is_bounded(box: LocalSandbox) -> None:
    result = await box.exec(["sh", "-c", "yes | head -c 5000000"], timeout_s=10, max_output_bytes=1000)
    assert result.exit_code == 0
    assert len(result.stdout) == 1000
    assert result.truncated


async def test_killed_is_never_exit_zero(box: LocalSandbox) -> None:
    assert (await sh(box, "kill -9 $$")).exit_code == -9
    assert (await sh(box, "kill -TERM $$")).exit_code == -15


async def test_timeout_kills_the_whole_tree(box: LocalSandbox) -> None:
    begun = time.monotonic()
    result = await sh(box, DAEMON.format(n=5151) + "; sleep 5151 & trap '' TERM; sleep 5151", timeout_s=0.3)
    assert time.monotonic() - begun < 2
    assert result.timed_out
    assert result.exit_code == -9
    assert await living(box, "5151") == 0


async def test_killed_work_cannot_go_on_to_exit_zero(box: LocalSandbox) -> None:
    for _ in range(10):
        running = asyncio.create_task(sh(box, "sleep 60; exit 0"))
        await asyncio.sleep(0.02)
        await box.kill_all()
        assert (await running).exit_code == -9
        late = await sh(box, "sleep 60; exit 0", timeout_s=0.02)
        assert (late.exit_code, late.timed_out) == (-9, True)


async def test_timeout_spares_other_work_in_the_box(box: LocalSandbox) -> None:
    process = await box.spawn(["sh", "-c", "sleep 6161 & wait"])
    slow = asyncio.create_task(sh(box, "sleep 0.8; echo done"))
    assert (await sh(box, "sleep 60", timeout_s=0.2)).timed_out
    assert (await slow).stdout == b"done\n"
    assert process.poll() is None
    assert await living(box, "6161") == 1


async def test_exec_does_not_wait_for_what_it_left_behind(box: LocalSandbox) -> None:
    begun = time.monotonic()
    result = await sh(box, "sleep 7171 & echo early")
    assert result.stdout == b"early\n"
    assert time.monotonic() - begun < 2
    assert await living(box, "7171") == 1


async def test_kill_all_finds_daemons_and_spares_spawned(box: LocalSandbox) -> None:
    process = await box.spawn(["sh", "-c", "sleep 8181 & while read line; do echo $line; done"])
    await sh(box, DAEMON.format(n=8181))
    assert await living(box, "8181") == 2
    await box.kill_all()
    assert await living(box, "8181") == 0
    await process.write(b"still here\n")
    assert await process.readline(2) == b"still here\n"
    await box.kill_all()


async def test_kill_all_beats_a_fork_bomb(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(max_processes=50)) as box:
        bomb = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nif os.fork(): os._exit(0)\n"
        bomb += "os.setsid()\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass\n"
        await box.exec(["python3", "-c", bomb], timeout_s=10)
        await asyncio.sleep(0.1)
        await box.kill_all()
        assert await out(box, "ls /proc | grep -c '^[0-9]'") in ("3", "4")


async def test_spawned_process_talks_and_dies_on_demand(box: LocalSandbox) -> None:
    process = await box.spawn(["cat"], env={"X": "1"})
    await process.write(b"one\ntwo\n")
    assert [await process.readline(2), await process.readline(2)] == [b"one\n", b"two\n"]
    with pytest.raises(TimeoutError):
        await process.readline(0.1)
    with pytest.raises(TimeoutError):
        await process.wait(0.1)
    assert process.poll() is None
    await process.kill()
    await process.kill()
    assert await process.wait(2) == -9
    assert await process.readline(2) == b""
    with pytest.raises(SandboxLost):
        await process.write(b"x")


async def test_spawned_process_that_ends_by_itself(box: LocalSandbox) -> None:
    process = await box.spawn(["sh", "-c", "seq 1 100000 >&2; echo last >&2; echo out; exit 3"])
    assert await process.readline(5) == b"out\n"
    assert await process.wait(5) == 3
    await asyncio.sleep(0.05)
    tail = process.stderr_tail()
    assert tail.endswith(b"100000\nlast\n")
    assert len(tail) <= 16 << 10


async def test_long_lines_come_whole(box: LocalSandbox) -> None:
    process = await box.spawn(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo"])
    assert len(await process.readline(10)) == 3_000_001


async def test_many_at_once_in_one_box(box: LocalSandbox) -> None:
    results = await asyncio.gather(*(sh(box, f"sleep 0.05; echo {n}") for n in range(20)))
    assert [int(result.stdout) for result in results] == list(range(20))


async def test_close_leaves_nothing(backend: LocalBackend) -> None:
    before = open_descriptors()
    box = await backend.create(SandboxSpec())
    await box.spawn(["sleep", "919293"])
    await sh(box, DAEMON.format(n=919293))
    assert len(host_processes("919293")) == 2
    await box.close()
    await box.close()
    assert host_processes("919293") == []
    assert box._process.poll() is not None
    await asyncio.sleep(0)
    assert open_descriptors() == before
    with pytest.raises(SandboxLost):
        await box.exec(["true"], timeout_s=1)
    with pytest.raises(SandboxLost):
        await box.get_tree()


async def test_cancelled_exec_kills_and_cancelled_close_finishes(backend: LocalBackend) -> None:
    box = await backend.create(SandboxSpec())
    task = asyncio.create_task(sh(box, "sleep 929394"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await living(box, "929394") == 0
    closing = asyncio.create_task(box.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await box.close()
    assert box._process.poll() is not None


async def test_a_box_killed_from_outside_is_lost_not_stuck(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        process = await box.spawn(["sleep", "939495"])
        running = asyncio.create_task(sh(box, "sleep 939495"))
        await asyncio.sleep(0.1)
        os.kill(first_process(box), signal.SIGKILL)
        result = await asyncio.wait_for(running, 5)
        assert result.exit_code is None
        assert await process.wait(5) != 0
        with pytest.raises(SandboxLost):
            await box.kill_all()
    assert host_processes("939495") == []


async def test_system_v_memory_does_not_outlive_a_wipe(box: LocalSandbox) -> None:
    make = "import ctypes; print(ctypes.CDLL(None).shmget(4711, 4096, 0o1666))"
    assert int(await python(box, make)) >= 0
    assert (await out(box, "wc -l < /proc/sysvipc/shm")) == "2"
    await box.wipe()
    assert (await out(box, "wc -l < /proc/sysvipc/shm")) == "1"
