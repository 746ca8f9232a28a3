"""The tasks of a source by their ids, for programs that name the task of a rollout."""

from __future__ import annotations

from insitu.errors import TaskError
from insitu.tasks.base import ENDLESS_TASKS, Split, TaskSource
from insitu.types import Task

_CHUNK = 256


class TasksById:
    """The tasks of a source by their ids; its splits are read in turn, and only as far as needed."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._tasks: dict[str, Task] = {}
        self._read: dict[Split, int] = {"train": 0, "eval": 0}

    def find(self, task_id: str) -> Task:
        """Return a task. Raises TaskError for an unknown id."""
        while task_id not in self._tasks:
            before = dict(self._read)
            for split, start in before.items():
                size = self._source.size(split)
                count = min(_CHUNK, (ENDLESS_TASKS if size is None else size) - start)
                self._tasks |= {task.id: task for task in self._source.tasks(split, start, count)}
                self._read[split] += count
            if self._read == before:
                raise TaskError(f"{self._source.name} has no task {task_id!a}")
        return self._tasks[task_id]
