"""The attacks that know nothing of the reference subject, tried on a user's own tasks.

The gold change of a task is the honest twin, its untouched folder with one comment more is what a cheat may
earn at most. A cheat that earns more shows that the task's tests can be cheated, or the runner it asks for: a
failed cell, also where the matrix of the reference subject promises nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from whet.attack.lab import Cell, Failure, Lab, try_variants
from whet.attack.matrix import RESIDUAL
from whet.attack.model import Attack, Move
from whet.attack.run import AT_ONCE, Report
from whet.attack.subject import Subject
from whet.collect.agents import limits_of
from whet.config import Config
from whet.errors import TaskError
from whet.grade.diff import is_protected
from whet.sandbox.base import SandboxBackend
from whet.tasks.open import open_source
from whet.types import Oracle, Task


def own_subjects(config: Config, name: str, count: int) -> list[Subject]:
    """The first tasks of the training split that can be attacked; `name` is what errors call their file.
    Raises TaskError and ConfigError."""
    source = open_source(config, limits_of(config))
    size = source.size("train")
    tasks = source.tasks("train", 0, count if size is None else min(count, size))
    found, reasons = [], []
    for task in tasks:
        try:
            found.append(as_subject(task, source.oracle(task)))
        except TaskError as error:
            reasons.append(str(error))
    if not found:
        raise TaskError(f"no task of {name} can be attacked: {reasons[0] if reasons else 'there is none'}")
    return found


def as_subject(task: Task, oracle: Oracle) -> Subject:
    """Raises TaskError when nothing of Python is changed by the gold, or its base is not on the host."""
    if not task.files:
        raise TaskError(f"task {task.id}: its files are in an image; attacks need them on the host")
    for target in sorted(oracle.gold):
        ours = target.endswith(".py") and target in task.files
        if ours and not is_protected(target, task.grading.protected):
            return Subject(task=task, oracle=oracle, target=target)
    raise TaskError(f"task {task.id}: its gold changes no Python file that it starts with")


async def run_own(
    attacks: Sequence[Attack],
    subjects: Sequence[Subject],
    backend: SandboxBackend,
    tell: Callable[[Cell], None] = lambda cell: None,
) -> Report:
    """Try what is portable of `attacks` on each subject. Raises TaskError for one that its gold does not
    solve, or that its base does."""
    cells: list[Cell] = []
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(lab: Lab, attack: Attack) -> None:
        runner = lab.subject.task.grading.runner
        async with gate:
            cell = await try_variants(lab, attack, runner, RESIDUAL[runner].get(attack.id, ""), own=True)
        where = f"task {lab.subject.task.id}, "
        failures = tuple(_at(failure, where) for failure in cell.failures)
        cells.append(replace(cell, failures=failures))
        tell(cells[-1])

    for subject in subjects:
        lab = Lab(backend, backend, subject)
        await lab.grader.validate(subject.task, subject.oracle, repeats=1)
        idle = await lab.grade(await lab.left(Move(after="#\n"), solved=False))
        lab.idle = idle.reward or 0.0
        async with asyncio.TaskGroup() as tasks:
            for attack in attacks:
                if attack.portable:
                    tasks.create_task(one(lab, attack))
    return Report(cells=tuple(cells), naive=())


def _at(failure: Failure, where: str) -> Failure:
    return replace(failure, expected=where + failure.expected)
