"""`python -m benchmarks sandbox`: what a sandbox costs, on every backend that this machine has.

Measured: start, one command, end, one sandbox after the other; then 64 sandboxes alive at once; then what is
left of them. With --json the last line is one object:
{backend: {"create_destroy_ms": {"p50", "p95"}, "parallel_64_s", "leaks"}}.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks._arguments import Arguments, count
from insitu.errors import SandboxError, SandboxStartError, SetupError
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.process_owner import LABEL as OWNER
from insitu.sandbox.process_owner import owner
from insitu.shutdown import run_interruptible
from insitu.storage.temp_dirs import cache_folder

PARALLEL = 64
IMAGE = "insitu-sandbox:bookworm"
EXEC_S = 60.0
LABEL = "insitu-bench"
PATIENCE_S = 2.0
"""For what a sandbox that was closed leaves behind for a moment."""
LOOK_S = 0.1


async def one(backend: SandboxBackend) -> float:
    """Milliseconds for a sandbox that runs one command."""
    begun = time.perf_counter()
    async with await backend.create(SandboxSpec(label=LABEL)) as sandbox:
        await check(sandbox)
    return (time.perf_counter() - begun) * 1000


async def check(sandbox: Sandbox) -> None:
    """Raises SandboxError for a sandbox that does not work: its time would mean nothing."""
    result = await sandbox.exec(["/bin/true"], timeout_s=EXEC_S)
    if result.exit_code != 0:
        raise SandboxError(f"/bin/true ended with {result.exit_code} in a sandbox")


async def many(backend: SandboxBackend) -> float:
    """Seconds until PARALLEL sandboxes are up together, each ran one command, and all are gone."""
    begun = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(backend.create(SandboxSpec(label=LABEL)) for _ in range(PARALLEL)), return_exceptions=True
        )
        sandboxes = [sandbox for sandbox in started if not isinstance(sandbox, BaseException)]
        stack.push_async_callback(lambda: asyncio.gather(*(sandbox.close() for sandbox in sandboxes)))
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        await asyncio.gather(*(check(sandbox) for sandbox in sandboxes))
    return time.perf_counter() - begun


def descendants() -> set[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    known, fresh = set[int](), {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - known
        known |= fresh
    return known


def mounted() -> set[str]:
    """Mounts that carry a name of insitu's, in this process's namespace. Those of a local sandbox are in its
    own, which ends with its processes; what others mount here meanwhile is no concern of a sandbox."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if "insitu" in line}


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is of this process's making."""

    processes: set[int]
    mounts: set[str]
    groups: set[str]
    containers: set[str]

    @classmethod
    def now(cls, backend: SandboxBackend) -> Seen:
        groups, containers = set[str](), set[str]()
        if isinstance(backend, LocalBackend) and backend.cgroups:
            groups = backend.cgroups.names()
        if isinstance(backend, DockerBackend):
            argv = ["docker", "ps", "--all", "--quiet", "--filter", f"label={OWNER}={owner()}"]
            done = subprocess.run(argv, capture_output=True, check=True, timeout=EXEC_S)
            containers = set(done.stdout.decode().split())
        # last: the docker command is a process too
        return cls(descendants(), mounted(), groups, containers)

    def since(self, before: Seen) -> int:
        """How many processes, mounts, control groups and containers there are that were not there."""
        pairs = (
            (self.processes, before.processes),
            (self.mounts, before.mounts),
            (self.groups, before.groups),
            (self.containers, before.containers),
        )
        return sum(len(mine - theirs) for mine, theirs in pairs)


async def left(backend: SandboxBackend, before: Seen, max_wait_s: float = PATIENCE_S) -> int:
    """What of this process's sandboxes is there that should be gone. An ended child is collected and an empty
    group removed a moment later: what is gone within `max_wait_s` was not left."""
    found = Seen.now(backend).since(before)
    for _ in range(round(max_wait_s / LOOK_S)):
        if not found:
            break
        await asyncio.sleep(LOOK_S)
        found = Seen.now(backend).since(before)
    return found


async def measure(backend: SandboxBackend, rounds: int) -> dict[str, object]:
    await one(backend)  # looks up the image, fills caches
    before = Seen.now(backend)
    times = sorted([await one(backend) for _ in range(rounds)])
    parallel = await many(backend)
    return {
        "create_destroy_ms": {
            "p50": round(statistics.median(times), 1),
            "p95": round(times[min(len(times) - 1, int(len(times) * 0.95))], 1),
        },
        "parallel_64_s": round(parallel, 2),
        "leaks": await left(backend, before),
    }


async def backends(image: str) -> tuple[dict[str, SandboxBackend], dict[str, str]]:
    """What can be measured here, and why the rest cannot."""
    found: dict[str, SandboxBackend] = {}
    missing: dict[str, str] = {}
    try:
        found["local"] = LocalBackend()
    except SetupError as error:
        missing["local"] = str(error)
    try:
        docker = DockerBackend(image, cache=cache_folder())
        await docker.image_digest(image)
        found["docker"] = docker
    except (SetupError, SandboxStartError) as error:
        missing["docker"] = str(error)
    return found, missing


async def run(rounds: int, image: str, *, plain: bool) -> dict[str, dict[str, object]]:
    found, missing = await backends(image)
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}", file=sys.stderr, flush=True)
    results: dict[str, dict[str, object]] = {}
    for name, backend in found.items():
        results[name] = result = await measure(backend, rounds)
        if plain:
            print(f"{name}: {orjson.dumps(result).decode()}", flush=True)
    return results


def main(arguments: Sequence[str]) -> int:
    parser = Arguments(prog="benchmarks sandbox", description="what a sandbox costs")
    parser.add_argument("--rounds", type=count, default=20, help="sandboxes one after the other (default 20)")
    parser.add_argument(
        "--image",
        default=IMAGE,
        help=f"image to measure docker with (default {IMAGE}, by scripts/docker-base)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    results = run_interruptible(run(options.rounds, options.image, plain=not options.json))
    if options.json:
        print(orjson.dumps(results).decode())
    leaky = [name for name, result in results.items() if result["leaks"]]
    for name in leaky:
        print(f"{name}: sandboxes left something behind: {results[name]['leaks']}", file=sys.stderr)
    return 0 if results and not leaky else 1
