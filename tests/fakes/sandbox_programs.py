"""The few programs that every fake sandbox has."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from insitu.types import FileEntry
from tests.fakes.sandbox_run import FakeRun, Program


async def true(run: FakeRun) -> int:
    return 0


async def false(run: FakeRun) -> int:
    return 1


async def echo(run: FakeRun) -> int:
    run.out(" ".join(run.argv[1:]).encode() + b"\n")
    return 0


async def sleep(run: FakeRun) -> int:
    seconds = run.argv[1]
    await asyncio.sleep(math.inf if seconds == "infinity" else float(seconds))
    return 0


async def cat(run: FakeRun) -> int:
    """Of a file, or line by line of its input."""
    for path in run.argv[1:]:
        entry = run.sandbox.files.get(path if path.startswith("/") else f"{run.cwd}/{path}")
        if not isinstance(entry, FileEntry):
            run.err(f"cat: {path}: No such file or directory\n".encode())
            return 1
        run.out(entry.content)
    while len(run.argv) == 1 and (line := await run.readline()):
        run.out(line)
    return 0


PROGRAMS: Mapping[str, Program] = {"true": true, "false": false, "echo": echo, "sleep": sleep, "cat": cat}
