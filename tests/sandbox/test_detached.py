"""Detached runs in local sandboxes: marker, log and exit by polling, and no way to look finished when
killed."""

from __future__ import annotations

import asyncio

import pytest
from sandbox_rig import out

from insitu.errors import SandboxError, SandboxLost, SandboxTransient
from insitu.sandbox import detached
from insitu.sandbox.base import ExecResult, SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox


async def test_it_ends_with_its_own_code_and_keeps_what_it_said(sandbox: LocalSandbox) -> None:
    script = "pwd; echo $A; cat; echo problem >&2; exit 7"
    run = await detached.start(
        sandbox, ["sh", "-c", script], env={"A": "b c"}, cwd="/tmp", stdin=b"in\x00put"
    )
    assert await run.wait(20) == 7
    assert await run.read_log() == b"/tmp\nb c\nin\x00putproblem\n"
    assert await run.read_log(5, max_bytes=3) == b"b c"


async def test_another_handle_finds_it_running_and_then_ended(sandbox: LocalSandbox) -> None:
    run = await detached.start(
        sandbox, ["sh", "-c", "echo up; while [ ! -f go ]; do sleep 0.02; done; echo done"]
    )
    again = detached.attach(sandbox, run.id)
    assert await again.poll() is None
    await sandbox.put(f"{sandbox.workdir}/go", b"")
    assert await again.wait(20) == 0
    assert await again.read_log() == b"up\ndone\n"
    assert await run.poll() == 0
    with pytest.raises(SandboxError, match="knows no run"):
        await detached.attach(sandbox, "0" * 26).poll()
    for wrong in ("", "../x", "a b", "-x"):
        with pytest.raises(SandboxError, match="no id"):
            detached.attach(sandbox, wrong)


async def test_killed_is_never_exit_0_and_nothing_is_left(sandbox: LocalSandbox) -> None:
    # Each level ends well when the one below is killed first; a daemon has left session and parent.
    script = "trap '' TERM HUP; (setsid sleep 737373 &); sh -c 'sleep 737373; exit 0'; exit 0"
    for _ in range(3):
        run = await detached.start(sandbox, ["sh", "-c", script])
        await asyncio.sleep(0.05)
        await run.kill()
        assert await run.wait(10) in (-9, 137)
        assert await detached.attach(sandbox, run.id).poll() in (-9, 137)
    assert await out(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[7]37373' || true") == "0"
    await run.kill()


async def test_kill_all_ends_it_and_it_counts_as_killed(sandbox: LocalSandbox) -> None:
    run = await detached.start(sandbox, ["sleep", "60"])
    other = await detached.start(sandbox, ["true"])
    assert await other.wait(20) == 0
    await sandbox.kill_all()
    assert await run.wait(10) in (-9, 137)
    assert await other.poll() == 0


async def test_a_command_that_times_out_or_is_cancelled_spares_it(sandbox: LocalSandbox) -> None:
    run = await detached.start(sandbox, ["sh", "-c", "sleep 60 & wait"])
    assert (await sandbox.exec(["sleep", "60"], timeout_s=0.1)).timed_out
    polling = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60))
    await asyncio.sleep(0.05)
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling
    assert await run.poll() is None


async def test_left_to_itself_it_goes_on_as_well(sandbox: LocalSandbox) -> None:
    run = await detached.start(sandbox, ["sh", "-c", "sleep 0.2; exit 4"], stdin=b"x", hold=False)
    assert await run.wait(20) == 4


async def test_endless_output_neither_fills_the_sandbox_nor_blocks_the_command(sandbox: LocalSandbox) -> None:
    script = "head -c 50000000 /dev/zero; echo end > done"
    run = await detached.start(sandbox, ["sh", "-c", script], max_log_bytes=100_000)
    assert await run.wait(60) == 0
    assert len(await run.read_log()) in range(1, 100_352 + 1)
    assert (await sandbox.get_tree())["done"].content == b"end\n"


async def test_an_exit_is_told_though_the_disk_is_full(backend: LocalBackend) -> None:
    async with await LocalBackend(backend.mode, scratch_bytes=1 << 20).create(SandboxSpec()) as sandbox:
        run = await detached.start(sandbox, ["sh", "-c", "cat /dev/zero > /tmp/fill; exit 5"])
        assert await run.wait(30) == 5


async def test_a_missing_program_is_an_exit_code(sandbox: LocalSandbox) -> None:
    run = await detached.start(sandbox, ["no-such-program"])
    assert await run.wait(20) == 127
    assert b"no-such-program" in await run.read_log()


class Flaky(LocalSandbox):
    """Its connection drops at every second call."""

    calls = 0

    async def exec(self, *arguments: object, **named: object) -> ExecResult:
        self.calls += 1
        if self.calls % 2 == 0:
            raise SandboxTransient("connection reset")
        return await super().exec(*arguments, **named)  # type: ignore[arg-type]


async def test_a_dropped_connection_costs_nothing_and_a_lost_sandbox_is_told(sandbox: LocalSandbox) -> None:
    run = await detached.start(sandbox, ["sh", "-c", "sleep 0.5; exit 3"])
    sandbox.__class__ = Flaky
    assert await run.wait(30) == 3
    sandbox.__class__ = LocalSandbox
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await run.poll()
