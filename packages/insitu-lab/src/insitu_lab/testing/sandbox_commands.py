"""Contract of commands and processes in a sandbox."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from insitu.errors import SandboxError, SandboxLost
from insitu.sandbox.base import Sandbox
from insitu_lab.testing.shell import count_processes, run, shell, wait_for_processes


class CommandContract:
    """`exec`, `spawn`, timeouts, cancellation and `kill_all`."""

    async def test_exec_gives_code_streams_and_takes_input_folder_and_environment(
        self, sandbox: Sandbox
    ) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "cat; echo $A; pwd; echo problem >&2; exit 7"],
            timeout_s=20,
            stdin=b"in\x00put\n",
            env={"A": "b c"},
            cwd="/tmp",
        )
        assert result.exit_code == 7
        assert result.stdout == b"in\x00put\nb c\n/tmp\n"
        assert result.stderr == b"problem\n"
        assert not result.timed_out
        assert not result.truncated

    async def test_exec_begins_in_the_work_folder(self, sandbox: Sandbox) -> None:
        assert await run(sandbox, "pwd") == sandbox.workdir == "/work"

    async def test_arguments_reach_the_program_unchanged(self, sandbox: Sandbox) -> None:
        odd = ["a b", "$HOME", "`id`", "'\"", "\xe9\n", "", "-x", "*"]
        result = await sandbox.exec(["printf", "%s|", *odd], timeout_s=20)
        assert result.stdout.decode() == "|".join([*odd, ""])

    async def test_missing_command_is_an_ordinary_failure(self, sandbox: Sandbox) -> None:
        missing = await sandbox.exec(["no-such-command"], timeout_s=20)
        assert (missing.exit_code, b"no-such-command" in missing.stderr) == (127, True)

    async def test_missing_folder_is_an_ordinary_failure(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["true"], timeout_s=20, cwd="/nowhere")).exit_code == 126

    async def test_no_command_and_a_nul_are_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError):
            await sandbox.exec([], timeout_s=20)
        with pytest.raises(SandboxError, match="NUL"):
            await sandbox.exec(["echo", "a\0b"], timeout_s=20)

    async def test_input_of_megabytes_arrives_whole(self, sandbox: Sandbox) -> None:
        data = os.urandom(3 << 20)
        result = await sandbox.exec(["cat"], timeout_s=20, stdin=data, max_output_bytes=4 << 20)
        assert result.stdout == data

    async def test_output_is_bounded_and_says_so(self, sandbox: Sandbox) -> None:
        result = await shell(sandbox, "yes | head -c 5000000; yes | head -c 3000000 >&2")
        assert result.exit_code == 0
        assert (len(result.stdout), len(result.stderr)) == (1 << 20, 1 << 20)
        assert result.truncated

    async def test_a_killed_command_is_not_exit_zero(self, sandbox: Sandbox) -> None:
        assert (await shell(sandbox, "kill -9 $$")).exit_code in (-9, 137)
        assert (await shell(sandbox, "kill -TERM $$")).exit_code in (-15, 143)

    async def test_a_timeout_kills_the_whole_tree(self, sandbox: Sandbox) -> None:
        begun = time.monotonic()
        daemon = (
            "(setsid sh -c 'setsid sleep 5151 & ' >/dev/null 2>&1 &); sleep 5151 & trap '' TERM; sleep 5151"
        )
        result = await shell(sandbox, daemon, timeout_s=0.5)
        assert time.monotonic() - begun < 15
        assert result.timed_out
        assert result.exit_code in (-9, 137)
        assert await count_processes(sandbox, "5151") == 0

    async def test_a_timeout_spares_other_work(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "sleep 6161 & wait"])
        slow = asyncio.create_task(shell(sandbox, "sleep 1; echo done"))
        assert (await shell(sandbox, "sleep 60", timeout_s=0.3)).timed_out
        assert (await slow).stdout == b"done\n"
        assert process.poll() is None
        await wait_for_processes(sandbox, "6161", 1)

    async def test_what_a_timeout_killed_cannot_go_on_to_exit_zero(self, sandbox: Sandbox) -> None:
        for _ in range(5):
            late = await shell(sandbox, "sleep 60; exit 0", timeout_s=0.05)
            assert late.timed_out
            assert late.exit_code in (-9, 137)

    async def test_output_before_a_timeout_is_kept(self, sandbox: Sandbox) -> None:
        assert (await shell(sandbox, "echo begun; sleep 60", timeout_s=1)).stdout == b"begun\n"

    async def test_exec_does_not_wait_for_what_it_left_behind(self, sandbox: Sandbox) -> None:
        start = time.monotonic()
        assert (await shell(sandbox, "sleep 7171 & echo early")).stdout == b"early\n"
        assert time.monotonic() - start < 15
        await wait_for_processes(sandbox, "7171", 1)

    async def test_a_cancelled_exec_leaves_no_process(self, sandbox: Sandbox) -> None:
        task = asyncio.create_task(shell(sandbox, "sleep 929394"))
        for _ in range(100):
            if await count_processes(sandbox, "929394"):
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await count_processes(sandbox, "929394") == 0

    async def test_many_commands_at_once(self, sandbox: Sandbox) -> None:
        results = await asyncio.gather(*(shell(sandbox, f"sleep 0.1; echo {n}") for n in range(20)))
        assert [int(result.stdout) for result in results] == list(range(20))

    async def test_a_spawned_process_talks_and_dies_on_demand(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(
            ["sh", "-c", 'while read line; do echo "$X $line"; done'], env={"X": "1"}
        )
        await process.write(b"one\ntwo\n")
        assert [await process.readline(20), await process.readline(20)] == [b"1 one\n", b"1 two\n"]
        with pytest.raises(TimeoutError):
            await process.readline(0.1)
        with pytest.raises(TimeoutError):
            await process.wait(0.1)
        assert process.poll() is None
        await process.kill()
        await process.kill()
        assert await process.wait(20) in (-9, 137)
        assert process.poll() in (-9, 137)
        assert await process.readline(20) == b""
        with pytest.raises(SandboxLost):
            await process.write(b"x")

    async def test_killing_a_spawned_process_kills_what_it_started(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "sleep 3131 & setsid sleep 3131 & echo up; wait"])
        assert await process.readline(20) == b"up\n"
        await process.kill()
        assert await process.wait(20) != 0
        assert await count_processes(sandbox, "3131") == 0

    async def test_a_spawned_process_that_ends_by_itself(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "seq 1 100000 >&2; echo last >&2; echo out; exit 3"])
        assert await process.readline(20) == b"out\n"
        assert await process.wait(20) == 3
        await asyncio.sleep(0.1)
        tail = process.stderr_tail()
        assert tail.endswith(b"100000\nlast\n")
        assert len(tail) <= 16 << 10

    async def test_long_lines_come_whole(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo"])
        assert len(await process.readline(20)) == 3_000_001

    async def test_kill_all_finds_daemons_and_spares_spawned(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "while read line; do echo $line; done"])
        await shell(sandbox, "(setsid sh -c 'setsid sleep 8181 & ' >/dev/null 2>&1 &) ; sleep 0.1")
        await wait_for_processes(sandbox, "8181", 1)
        await sandbox.kill_all()
        await sandbox.kill_all()
        assert await count_processes(sandbox, "8181") == 0
        await process.write(b"still here\n")
        assert await process.readline(20) == b"still here\n"

    async def test_kill_all_finds_what_cleared_its_environment_and_spares_spawned(
        self, sandbox: Sandbox
    ) -> None:
        process = await sandbox.spawn(["sleep", "8383"])
        hide = "(env -i setsid sh -c 'sleep 8282 & sleep 8282 & wait' >/dev/null 2>&1 &) ; sleep 0.2"
        assert (await shell(sandbox, hide)).exit_code == 0
        await wait_for_processes(sandbox, "8282", 2)
        for _ in range(4):  # also while the backend looks at what it spawned
            await sandbox.kill_all()
        assert await count_processes(sandbox, "8282") == 0
        assert await count_processes(sandbox, "8383") >= 1
        assert process.poll() is None
        await process.kill()
