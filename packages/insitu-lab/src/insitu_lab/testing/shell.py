"""Shell commands in a sandbox under test."""

from __future__ import annotations

import asyncio

from insitu.sandbox.base import ExecResult, Sandbox


async def shell(sandbox: Sandbox, script: str, timeout_s: float = 20.0) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def run(sandbox: Sandbox, script: str) -> str:
    """Run a script that must succeed; return its output without surrounding white space."""
    result = await shell(sandbox, script)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def count_processes(sandbox: Sandbox, argument: str) -> int:
    """Return how many processes of the sandbox have this argument."""
    pattern = f"[{argument[0]}]{argument[1:]}"  # does not match itself
    script = f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^{pattern}$'"
    return int((await shell(sandbox, script)).stdout)


async def wait_for_processes(sandbox: Sandbox, argument: str, count: int) -> None:
    """Wait until `count` processes have this argument: a shell may have forked and not yet called exec."""
    async with asyncio.timeout(10):
        while await count_processes(sandbox, argument) != count:
            pass
