"""Validation of tasks of several steps: in one sandbox each fails before its solution and passes after it."""

from __future__ import annotations

from dataclasses import replace

from insitu.agents.artifacts import follow_links
from insitu.agents.worker import run_command
from insitu.errors import GradeError, TaskError
from insitu.grading.grader import Grader
from insitu.grading.verdict import gold_fails
from insitu.sandbox.base import Sandbox, SandboxBackend
from insitu.types import Oracle, Outcome, Task, TaskStep, Verdict
from insitu_tasksets.live import opened, solve

MAX_BYTES, MAX_FILES = 512 << 20, 200_000


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
                before = await _graded(grader, step, own, sandbox)
                if before.outcome is Outcome.RESOLVED:
                    raise TaskError(f"step {step.name}: it passes before its solution")
                await solve(sandbox, replace(step.task, id=task.id), own)
                after = await _graded(grader, step, own, sandbox)
                if after.outcome is not Outcome.RESOLVED:
                    why = gold_fails(after.outcome, after.reason, after.evidence or ())
                    raise TaskError(f"step {step.name}: {why}")


async def _graded(grader: Grader, step: TaskStep, oracle: Oracle, sandbox: Sandbox) -> Verdict:
    tree = await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)
    verdict = await grader.grade(step.task, oracle, await follow_links(sandbox, step.task.files, tree))
    if verdict.outcome is Outcome.INFRA:
        raise GradeError(f"step {step.name} could not be validated: {verdict.reason}")
    return verdict
