"""Tasks that are graded in the agent's own sandbox: a whole set of them, and their validation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from insitu.errors import GradeError, TaskError
from insitu.grading.grader import Grader
from insitu.grading.verdict import gold_fails
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.base_tree import set_up
from insitu.types import Oracle, Outcome, Task, Verdict

SOLUTION_AT = "/solution"


def everywhere(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row whose task is graded in its agent's sandbox, for `tasks.transform`."""
    return {**row, "where": "live"}


@asynccontextmanager
async def opened(backend: SandboxBackend, task: Task) -> AsyncIterator[Sandbox]:
    """Open a sandbox with the task's files and a place for its solution. Raises SandboxError."""
    places = (SOLUTION_AT,)
    spec = SandboxSpec.of(task.setup, network="none", places=places, label=f"solve/{task.id}")
    async with await backend.create(spec) as sandbox:
        await set_up(sandbox, task.setup)
        if task.files:
            await sandbox.lay(task.files)
        yield sandbox


async def solve(sandbox: Sandbox, task: Task, oracle: Oracle) -> None:
    """Run the solution's solve.sh; what it starts lives on. Raises TaskError when it fails, SandboxError."""
    for path, entry in oracle.solve.items():
        executable = entry.executable or path == "solve.sh"
        await sandbox.put(f"{SOLUTION_AT}/{path}", entry.content, executable=executable)
    # By its shebang; bash runs a script without one.
    argv = ["bash", "-c", f"exec {SOLUTION_AT}/solve.sh"]
    done = await sandbox.exec(argv, timeout_s=task.limits.wall_s, env=oracle.solve_env)
    if done.exit_code != 0:
        how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
        raise TaskError(f"task {task.id}: the solution {how}")


async def validate_live(
    grader: Grader, backend: SandboxBackend, task: Task, oracle: Oracle, *, repeats: int
) -> None:
    """Check that the task's sandbox fails as it is and passes once it is solved, each `repeats` times.

    Raises TaskError, and GradeError or SandboxError where the host fails.
    """
    for _ in range(repeats):
        async with opened(backend, task) as sandbox:
            if (await _graded(grader, task, oracle, sandbox)).outcome is Outcome.RESOLVED:
                raise TaskError(f"task {task.id}: the base already passes")
        async with opened(backend, task) as sandbox:
            await sandbox.lay(oracle.gold)
            if oracle.solve:
                await solve(sandbox, task, oracle)
            solved = await _graded(grader, task, oracle, sandbox)
            if solved.outcome is not Outcome.RESOLVED:
                why = gold_fails(solved.outcome, solved.reason, solved.evidence or ())
                raise TaskError(f"task {task.id}: {why}")


async def _graded(grader: Grader, task: Task, oracle: Oracle, sandbox: Sandbox) -> Verdict:
    verdict = await grader.grade_live(task, oracle, sandbox)
    if verdict.outcome is Outcome.INFRA:
        raise GradeError(f"task {task.id} could not be validated: {verdict.reason}")
    return verdict
