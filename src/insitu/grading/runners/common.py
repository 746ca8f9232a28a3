"""Shared parts of the runners."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Self

from insitu.errors import SandboxError, SandboxLost, boundary
from insitu.grading.runners.base import OracleRun, RunLimits
from insitu.sandbox.base import Bind, ExecResult, Sandbox, cpu_s
from insitu.sandbox.host_faults import host_fault
from insitu.types import FailingCheck, GradingPlan, Oracle, Task, Tree, Trust, task_hash

MAX_CHECKS = 20
MAX_CHECK_CHARS = 2048
"""Most characters of each text of a failing check."""


class RunnerBase:
    """Defaults of a runner: one process, no binds, oracles that lack nothing."""

    name: str
    trust: Trust
    places: tuple[str, ...] = ()

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        return ""

    def trust_of(self, task: Task, oracle: Oracle) -> tuple[Trust, str]:
        return self.trust, f"runner {self.name}"

    def asking(self, oracle: Oracle) -> tuple[Oracle, OracleRun | None]:
        return oracle, None

    def as_it_is(self) -> Self:
        return self

    def needs(self) -> tuple[Bind, ...]:
        return ()

    def processes(self, task: Task, oracle: Oracle) -> int:
        return 1

    def close(self) -> None:
        return


def control_task(files: Tree, plan: GradingPlan) -> Task:
    """Return a task that is solved as it is."""
    name = task_hash("", files, plan)
    return Task(id="control", prompt="", files=files, grading=plan, content_hash=name)


async def run_in(
    sandbox: Sandbox,
    argv: Sequence[str],
    limits: RunLimits,
    *,
    stdin: bytes = b"",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    max_output_bytes: int | None = None,
) -> ExecResult:
    """Run a command under `limits`. Raises SandboxLost; a timeout is a result."""
    with boundary(SandboxLost, "run the tests"):
        before = await cpu_s(sandbox)
        result = await sandbox.exec(
            argv,
            timeout_s=limits.left_s,
            stdin=stdin,
            cwd=cwd,
            env=env,
            max_output_bytes=max_output_bytes or limits.max_output_bytes,
        )
    if result.exit_code is None and not result.timed_out:
        raise SandboxLost("the sandbox died while the tests ran")
    if result.out_of_memory and (fault := await host_fault(sandbox, lost=False)):
        raise SandboxLost(fault)
    with contextlib.suppress(SandboxError):
        used = await cpu_s(sandbox)
        limits.meter.add(
            used - before if used < math.inf else used,
            result.duration_s,
            late=result.timed_out,
            wall_per_cpu=limits.wall_s / limits.cpu_s,
        )
    return result


LIMIT_CPU = 'ulimit -c 0; ulimit -S -t "$1" && { ulimit -H -t "$(($1 + 1))" 2>/dev/null || :; }'
"""Shell code: SIGXCPU after $1 seconds of CPU time, SIGKILL a second later. Plain `ulimit -t` only kills."""


def out_of_cpu(result: ExecResult, cpu_s: int) -> bool:
    """Return whether SIGXCPU, or SIGKILL a second later, ended the process or a shell's child.

    A candidate that sends itself the signal only changes the name of its failure.
    """
    killed = result.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    over = result.exit_code in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
    return over or (killed and result.duration_s > cpu_s and not result.out_of_memory)


def for_memory(out_of_memory: bool) -> str:
    """Return the suffix of a reason after an OOM kill."""
    return ", out of memory" if out_of_memory else ""


def failing_checks(checks: Iterable[FailingCheck]) -> tuple[FailingCheck, ...]:
    """Return the first checks with each text cut: of `tail` the end is kept, of the others the beginning."""
    return tuple(
        FailingCheck(
            name=check.name[:MAX_CHECK_CHARS],
            outcome=check.outcome[:MAX_CHECK_CHARS],
            expected=check.expected[:MAX_CHECK_CHARS],
            got=check.got[:MAX_CHECK_CHARS],
            tail=check.tail[-MAX_CHECK_CHARS:],
        )
        for check in islice(checks, MAX_CHECKS)
    )


def text_tail(*outputs: bytes) -> str:
    """Return the end of a process's output as text without control characters."""
    raw = b"\n".join(part for part in outputs if part.strip())[-4 * MAX_CHECK_CHARS :]
    text = raw.decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)[-MAX_CHECK_CHARS:]


def unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raise ValueError for a JSON object with a duplicate key; an `object_pairs_hook`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found
