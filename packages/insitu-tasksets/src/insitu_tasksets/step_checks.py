"""Validation of tasks of several steps: in one sandbox each fails before its solution and passes after it."""

from __future__ import annotations

from dataclasses import replace

from insitu.errors import GradeError, TaskError
from insitu.grading.grader import Grader
from insitu.sandbox.base import Sandbox, SandboxBackend
from insitu.types import Oracle, Outcome, Task, TaskStep, Tree, Verdict
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
                    await sandbox.lay(step.task.files)
                await _prepare(sandbox, step)
                before = await _graded(grader, step, own, await _tree(sandbox))
                if before.outcome is Outcome.RESOLVED:
                    raise TaskError(f"step {step.name}: it passes before its solution")
                await solve(sandbox, replace(step.task, id=task.id), own)
                after = await _graded(grader, step, own, await _tree(sandbox))
                if after.outcome is not Outcome.RESOLVED:
                    raise TaskError(f"step {step.name}: the gold fails ({after.outcome}): {after.reason}")


async def _prepare(sandbox: Sandbox, step: TaskStep) -> None:
    if not step.command:
        return
    argv = ["/bin/sh", "-c", step.command]
    done = await sandbox.exec(argv, timeout_s=step.task.setup.timeout_s)
    if done.exit_code != 0:
        raise TaskError(f"step {step.name}: its command ended with {done.exit_code}")


async def _tree(sandbox: Sandbox) -> Tree:
    return await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)


async def _graded(grader: Grader, step: TaskStep, oracle: Oracle, tree: Tree) -> Verdict:
    verdict = await grader.grade(step.task, oracle, tree)
    if verdict.outcome is Outcome.INFRA:
        raise GradeError(f"step {step.name} could not be validated: {verdict.reason}")
    return verdict
