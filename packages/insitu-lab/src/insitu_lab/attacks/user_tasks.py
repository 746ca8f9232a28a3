"""Portable attacks on a user's own tasks.

The gold change is the honest twin. A cheat that earns more than the untouched folder is a failed cell, also
where the matrix of the reference subject is residual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from insitu.config import Config
from insitu.errors import GradeError, SandboxError, TaskError
from insitu.grading.diff import changes, is_protected
from insitu.grading.oracles import solution
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.sandbox.base import SandboxBackend
from insitu.tasks.base import Split
from insitu.tasks.factory import open_source
from insitu.types import Oracle, Task
from insitu_lab.attacks.matrix import RESIDUAL
from insitu_lab.attacks.model import Attack, Move
from insitu_lab.attacks.run import AT_ONCE, AttackReport
from insitu_lab.attacks.runner import AttackRunner, Cell, Failure, try_variants
from insitu_lab.attacks.target import Target


def user_targets(
    config: Config, name: str, count: int, tell: Callable[[str], None] = lambda line: None
) -> list[Target]:
    """Return the first tasks that can be attacked, of the training split first.

    `name`: of the source, for errors; `tell`: called for each task that is left out. Raises TaskError,
    ConfigError.
    """
    source = open_source(config, limits_of(config), runner_for)
    found, left_out = list[Target](), list[str]()
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        size, missing = source.size(split), count - len(found) - len(left_out)
        for task in source.tasks(split, 0, missing if size is None else min(missing, size)):
            try:
                found.append(as_target(task, source.oracle(task)))
            except TaskError as error:
                left_out.append(str(error))
    if not found:
        raise TaskError(f"no task of {name} can be attacked: {left_out[0] if left_out else 'there is none'}")
    for reason in left_out:
        tell(f"left out: {reason}")
    return found


def as_target(task: Task, oracle: Oracle) -> Target:
    """Return the target. Raises TaskError without a gold Python change or without files on the host."""
    if not task.files:
        raise TaskError(f"task {task.id}: its files are in an image; attacks need them on the host")
    if not (oracle.gold or oracle.gold_patch):
        raise TaskError(f"task {task.id}: it has no gold, which is the honest twin")
    solved = solution(task, oracle, task.files)
    for target in changes(task.files, solved)[0]:
        ours = target.endswith(".py") and target in task.files
        if ours and not is_protected(target, task.grading.protected):
            return Target(task=task, oracle=oracle, target=target, solved=solved)
    raise TaskError(f"task {task.id}: its gold changes no Python file that it starts with")


async def run_user_tasks(
    attacks: Sequence[Attack],
    subjects: Sequence[Target],
    backend: SandboxBackend,
    tell: Callable[[Cell], None] = lambda cell: None,
) -> AttackReport:
    """Run the portable attacks on each subject; one that does not validate is reported as unfit."""
    cells: list[Cell] = []
    unfit: list[Failure] = []
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(lab: AttackRunner, attack: Attack) -> None:
        runner = lab.subject.task.grading.runner
        async with gate:
            cell = await try_variants(lab, attack, runner, RESIDUAL[runner].get(attack.id, ""), own=True)
        where = f"task {lab.subject.task.id}, "
        failures = tuple(_at(failure, where) for failure in cell.failures)
        cells.append(replace(cell, failures=failures))
        tell(cells[-1])

    for subject in subjects:
        lab = AttackRunner(backend, backend, subject)
        try:
            await lab.grader.validate(subject.task, subject.oracle, repeats=1)
            idle = await lab.grade(await lab.left(Move(after="#\n"), solved=False))
        except (TaskError, GradeError, SandboxError) as error:
            unfit.append(_unfit(subject.task, str(error)))
            continue
        lab.idle = idle.reward or 0.0
        async with asyncio.TaskGroup() as tasks:
            for attack in attacks:
                if attack.portable:
                    tasks.create_task(one(lab, attack))
    return AttackReport(cells=tuple(cells), naive=(), unfit=tuple(unfit))


def _unfit(task: Task, reason: str) -> Failure:
    """Return the failure of a task that was not attacked; its id is 0."""
    got = " ".join(reason.split()).removeprefix(f"task {task.id}: ")
    expected = f"task {task.id}, its base fails and its gold passes"
    return Failure(id=0, runner=task.grading.runner, expected=expected, got=got)


def _at(failure: Failure, where: str) -> Failure:
    return replace(failure, expected=where + failure.expected)
