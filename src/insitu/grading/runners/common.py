"""What the runners share: the answers most of them give alike, and the way they run something in a
sandbox."""

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
    """A runner that needs nothing of its sandboxes and starts one process; the others say what is
    different."""

    name: str
    places: tuple[str, ...] = ()

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        return ""

    def needs(self) -> tuple[Bind, ...]:
        return ()

    def processes(self, task: Task, oracle: Oracle) -> int:
        return 1


def control_task(files: Tree, plan: GradingPlan) -> Task:
    """A task that is solved as it stands."""
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
    """Run what judges. Raises SandboxLost when the sandbox failed or died; a timeout is a result."""
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
    """By the signal that the limit sends, SIGXCPU, a second later SIGKILL, to the process itself or to what
    a shell ran. A candidate that sends it to itself gains nothing: all it changes is its failure's name."""
    killed = result.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    over = result.exit_code in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
    return over or (killed and result.duration_s > cpu_s and not result.out_of_memory)


def for_memory(out_of_memory: bool) -> str:
    """What a reason adds when the kernel killed something of the sandbox for want of memory."""
    return ", out of memory" if out_of_memory else ""


def share(tests: HiddenTests, fixed: int, kept: int) -> float:
    """What a task with reward `fraction` earns: the share of tests fixed, times that of tests not broken."""
    whole = fixed / max(1, len(tests.fail_to_pass))
    return whole * kept / len(tests.pass_to_pass) if tests.pass_to_pass else whole


def passing(tests: HiddenTests, passed: int, known: Mapping[str, str]) -> str:
    """How many of the required tests pass, in words."""
    required = (*tests.fail_to_pass, *tests.pass_to_pass)
    missing = sum(name not in known for name in required)
    return f"{passed} of {len(required)} tests pass" + (f", {missing} are missing" if missing else "")
