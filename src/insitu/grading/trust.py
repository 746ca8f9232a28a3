"""Trust of a task's verdicts, as known before grading: what its runner says of it."""

from __future__ import annotations

from insitu.errors import TaskError
from insitu.grading.runners.find import runner_named
from insitu.tasks.base import REWARD_ONLY
from insitu.types import Oracle, Task, Trust

ORDER: tuple[Trust, ...] = ("weak", "standard", "strong")


def below(trust: Trust, least: Trust) -> bool:
    return ORDER.index(trust) < ORDER.index(least)


def trust_of(task: Task, oracle: Oracle) -> tuple[Trust, str]:
    """Return the trust of a task's verdicts and its reason. Raises TaskError for an unknown runner.

    Verdicts on test files that only an image has may be weaker.
    """
    if trust := REWARD_ONLY.get(task.grading.runner):
        return trust, "the reward function decides"
    runner = runner_named(task.grading.runner)
    if runner is None:
        raise TaskError(f"task {task.id}: no runner {task.grading.runner!r}")
    return runner.trust_of(task, oracle)
