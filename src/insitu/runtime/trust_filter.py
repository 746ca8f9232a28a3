"""Holds a run to `grade.min_trust`: a task whose verdicts are worth less is refused before anything runs,
or left out, as `tasks.on_invalid_row` says. Called by the verbs that roll out.
"""

from __future__ import annotations

from collections.abc import Callable

from insitu.config import Config
from insitu.errors import TaskError
from insitu.grading.trust import below, trust_of
from insitu.tasks.base import TaskSource
from insitu.tasks.dataset import RowSource
from insitu.types import Oracle, Task


def hold_strength(config: Config, source: TaskSource, say: Callable[[str], None]) -> None:
    """Leave out what is judged weaker than asked for; `say` gets a line when there is some. Raises TaskError
    where it must not be left out, or where nothing else is there."""
    least = config.grade.min_trust
    if least == "weak":
        return
    if not isinstance(source, RowSource):
        for task in source.tasks("train", 0, 1):  # of one kind all
            if why := _weaker(config, task, source.oracle(task)):
                raise TaskError(f"grade.min_trust = {least}: {why}")
        return
    kept: set[str] = set()
    reasons: list[str] = []
    for item in source.used():
        if why := _weaker(config, item.task, item.oracle):
            reasons.append(why)
        else:
            kept.add(item.task.content_hash)
    if not reasons:
        return
    line = f"grade.min_trust = {least}: {len(reasons)} of {len(reasons) + len(kept)} tasks are judged weaker"
    if config.tasks.on_invalid_row == "refuse" or not kept:
        more = "; tasks.on_invalid_row=skip leaves such tasks out" if kept else ""
        raise TaskError(f"{line}, the first: {reasons[0]}{more}")
    source.keep(frozenset(kept))
    say(f"{line} and are left out, the first: {reasons[0]}")


def _weaker(config: Config, task: Task, oracle: Oracle) -> str:
    trust, why = trust_of(task, oracle)
    return f"task {task.id}, {trust}: {why}" if below(trust, config.grade.min_trust) else ""
