"""Grading in the agent's sandbox: a set of such tasks, and validation, also of tasks of several steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from insitu.agents.artifacts import follow_links
from insitu.agents.worker import run_command
from insitu.errors import GradeError, TaskError
from insitu.grading.grader import Grader
from insitu.grading.verdict import gold_fails
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.base_tree import set_up
from insitu.types import Oracle, Outcome, Task, TaskStep, Verdict

SOLUTION_AT = "/solution"
MAX_BYTES, MAX_FILES = 512 << 20, 200_000
"""Most that is read of a sandbox."""


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
            _check_solved(await _graded(grader, task, oracle, sandbox), f"task {task.id}")


async def _graded(grader: Grader, task: Task, oracle: Oracle, sandbox: Sandbox) -> Verdict:
    return _known(await grader.grade_live(task, oracle, sandbox), f"task {task.id}")


def _known(verdict: Verdict, what: str) -> Verdict:
    """Return the verdict; raise GradeError where the host failed."""
    if verdict.outcome is Outcome.INFRA:
        raise GradeError(f"{what} could not be validated: {verdict.reason}")
    return verdict


def _check_solved(verdict: Verdict, what: str) -> None:
    """Raise TaskError for a verdict on a solution that does not pass."""
    if verdict.outcome is not Outcome.RESOLVED:
        why = gold_fails(verdict.outcome, verdict.reason, verdict.evidence or ())
        raise TaskError(f"{what}: {why}")


async def validate_steps(
    grader: Grader, backend: SandboxBackend, task: Task, oracle: Oracle, *, repeats: int
) -> None:
    """Run the steps with their solutions, `repeats` times.

    Raises TaskError, and GradeError or SandboxError where the host fails.
    """
    for _ in range(repeats):
        async with opened(backend, task) as sandbox:
            for number, (step, own) in enumerate(zip(task.steps, oracle.steps, strict=True)):
                if number:
                    await sandbox.lay(step.files)
                if trouble := await run_command(sandbox, step):
                    raise TaskError(trouble)
                before = await _graded_step(grader, step, own, sandbox)
                if before.outcome is Outcome.RESOLVED:
                    raise TaskError(f"step {step.name}: it passes before its solution")
                await solve(sandbox, replace(step.task, id=task.id), own)
                _check_solved(await _graded_step(grader, step, own, sandbox), f"step {step.name}")


async def _graded_step(grader: Grader, step: TaskStep, oracle: Oracle, sandbox: Sandbox) -> Verdict:
    tree = await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)
    tree = await follow_links(sandbox, step.task.files, tree)
    return _known(await grader.grade(step.task, oracle, tree), f"step {step.name}")
