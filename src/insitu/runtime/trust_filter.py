"""Apply `grade.min_trust`: tasks whose verdicts are less trusted are rejected, or skipped.

Which of the two depends on `tasks.on_invalid_row`.
"""

from __future__ import annotations

from collections.abc import Callable

from insitu.config import Config
from insitu.errors import TaskError
from insitu.grading.trust import below, trust_of
from insitu.tasks.base import TaskSource
from insitu.tasks.dataset import RowSource
from insitu.types import Oracle, Task


def filter_by_trust(config: Config, source: TaskSource, say: Callable[[str], None]) -> None:
    """Skip tasks below `grade.min_trust`, and pass a line to `say` if there are any.

    Raises TaskError if they must not be skipped, or if no task remains.
    """
    least = config.grade.min_trust
    if least == "weak":
        return
    if not isinstance(source, RowSource):
        for task in source.tasks("train", 0, 1):  # generated tasks are all of one kind
            if why := _distrust_reason(config, task, source.oracle(task)):
                raise TaskError(f"grade.min_trust = {least}: {why}")
        return
    kept: set[str] = set()
    reasons: list[str] = []
    for item in source.used():
        if why := _distrust_reason(config, item.task, item.oracle):
            reasons.append(why)
        else:
            kept.add(item.task.content_hash)
    if not reasons:
        return
    line = f"grade.min_trust = {least}: {len(reasons)} of {len(reasons) + len(kept)} tasks are less trusted"
    if config.task_set.on_invalid_row == "refuse" or not kept:
        more = "; set tasks.on_invalid_row=skip to skip them" if kept else ""
        raise TaskError(f"{line}, the first: {reasons[0]}{more}")
    source.keep(frozenset(kept))
    say(f"{line} and are skipped, the first: {reasons[0]}")


def _distrust_reason(config: Config, task: Task, oracle: Oracle) -> str:
    trust, why = trust_of(task, oracle)
    return f"task {task.id}, {trust}: {why}" if below(trust, config.grade.min_trust) else ""
