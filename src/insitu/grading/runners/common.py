"""Shared parts of the runners."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Mapping, Sequence

from insitu.errors import SandboxError, SandboxLost, boundary
from insitu.grading.runners.base import RunLimits
from insitu.sandbox.base import Bind, ExecResult, Sandbox, cpu_s
from insitu.types import GradingPlan, HiddenTests, Oracle, Task, Tree, task_hash


class RunnerBase:
    """Defaults of a runner: one process, no binds."""

    name: str
    places: tuple[str, ...] = ()

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        return ""

    def needs(self) -> tuple[Bind, ...]:
        return ()

    def processes(self, task: Task, oracle: Oracle) -> int:
        return 1


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
    with contextlib.suppress(SandboxError):
        used = await cpu_s(sandbox)
        limits.meter.add(
            used - before if used < math.inf else used,
            result.duration_s,
            late=result.timed_out,
            wall_per_cpu=limits.wall_s / limits.cpu_s,
        )
    return result


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


def unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raise ValueError for a JSON object with a duplicate key; an `object_pairs_hook`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def share(tests: HiddenTests, fixed: int, kept: int) -> float:
    """Return the reward `fraction`: share of tests fixed times share of tests not broken."""
    score = fixed / max(1, len(tests.fail_to_pass))
    return score * kept / len(tests.pass_to_pass) if tests.pass_to_pass else score


def passing(tests: HiddenTests, passed: int, known: Mapping[str, str]) -> str:
    """Return the reason: how many required tests pass."""
    required = (*tests.fail_to_pass, *tests.pass_to_pass)
    missing = sum(name not in known for name in required)
    return f"{passed} of {len(required)} tests pass" + (f", {missing} are missing" if missing else "")
