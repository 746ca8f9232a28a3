"""Shared by the sandbox tests: small helpers that look at a sandbox from inside and at the host from
outside."""

from __future__ import annotations

from pathlib import Path

from insitu.sandbox.base import ExecResult, Sandbox


async def sh(sandbox: Sandbox, script: str, timeout_s: float = 10.0) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def out(sandbox: Sandbox, script: str) -> str:
    result = await sh(sandbox, script)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def python(sandbox: Sandbox, code: str, timeout_s: float = 10.0) -> str:
    result = await sandbox.exec(["python3", "-c", code], timeout_s=timeout_s)
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode().strip()


def host_processes(marker: str) -> list[int]:
    """Host pids whose command line holds `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
