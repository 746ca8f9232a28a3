"""The grading runner of a task, by its name in the registry."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from insitu import registry
from insitu.errors import TaskError
from insitu.grading.runners.base import GradingRunner
from insitu.types import Oracle, Task

LIVE = frozenset({"command", "harbor"})
"""Runners that can judge in the agent's own sandbox."""
_opened: dict[str, GradingRunner] = {}
"""One of each kind for the whole process: they hold idle processes of checkers."""


def runner_named(name: str) -> GradingRunner | None:
    """Return the runner of a name; None if there is none."""
    if name not in _opened and _is_runner(name):
        _opened[name] = registry.find("runners", name)()
    return _opened.get(name)


@functools.cache
def _is_runner(name: str) -> bool:
    # A data set asks once per task, and entry points are read from disk.
    return name in registry.names("runners")


def opened_runners() -> Sequence[GradingRunner]:
    """Return the runners that were used so far."""
    return tuple(_opened.values())


def runner_for(task: Task, oracle: Oracle) -> GradingRunner:
    """Return the runner of a task. Raises TaskError for a task that it cannot judge."""
    runner = runner_named(task.grading.runner)
    if runner is None and (package := registry.satellite_of("runners", task.grading.runner)):
        raise TaskError(f"task {task.id}: runner {task.grading.runner} {registry.not_installed(package)}")
    if runner is None:
        known = ", ".join(sorted(registry.names("runners")))
        raise TaskError(f"task {task.id}: no runner {task.grading.runner!r} (known: {known})")
    if oracle.task_id != task.id:
        raise TaskError(f"task {task.id} has the oracle of {oracle.task_id}")
    if not task.content_hash:
        raise TaskError(f"task {task.id} has no content_hash")
    if task.grading.where == "live" and runner.name not in LIVE:
        raise TaskError(f"task {task.id}: where = live needs checks, not runner {runner.name}")
    runner.check(task, oracle)
    return runner
