"""Task sets of a run as one source, and which of them each draw of training belongs to.

Every task carries the name of its arm (`Task.part`), by which its agent, limits and reward are found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from insitu.config import Arm, Config, EvalTable
from insitu.errors import TaskError
from insitu.tasks.base import Split, TaskSource
from insitu.tasks.dataset import RowSource
from insitu.types import Oracle, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """An open source of tasks."""

    arm: Arm
    source: TaskSource
    agents: tuple[str, ...] = ()
    """Parts of its agents, where it has several."""

    @property
    def name(self) -> str:
        return self.arm.task_set

    @property
    def config(self) -> Config:
        """The run's configuration with this set alone, under its own tables and the evaluation's."""
        return self.arm.config

    def size(self, split: Split) -> int | None:
        return self.source.size(split)

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return self._marked(self.source.tasks(split, start, count), start)

    def train_ids(self) -> Sequence[str]:
        """Return the ids of the training split by their indices; the set must have an end."""
        source = self.source
        if isinstance(source, RowSource):
            return source.train_ids()
        return [task.id for task in source.tasks("train", 0, source.size("train") or 0)]

    def examples(self) -> Sequence[Task]:
        """Return tasks that represent all others in what they need of a sandbox."""
        source = self.source
        return self._marked(
            source.examples() if isinstance(source, RowSource) else source.tasks("train", 0, 1)
        )

    def _marked(self, tasks: Sequence[Task], start: int = 0) -> Sequence[Task]:
        # The next task begins with the next agent: with fewer samples than agents all are used.
        return [
            replace(task, part=self.arm.part, agents=self._from(index))
            for index, task in enumerate(tasks, start)
        ]

    def _from(self, index: int) -> tuple[str, ...]:
        first = index % len(self.agents) if self.agents else 0
        return self.agents[first:] + self.agents[:first]


class TaskMix:
    """Implements TaskSource over all task sets of a run, one after the other."""

    def __init__(self, sets: Sequence[TaskSet], evaluated: Sequence[TaskSet] = ()) -> None:
        """Set up. evaluated: sets as they are for evaluations with tables of their own."""
        self.sets = sets
        self._every = (*sets, *evaluated)
        self._by_part = {part: one for one in self._every for part in (one.arm.part, *one.agents)}

    @property
    def name(self) -> str:
        return " + ".join(one.source.name for one in self.sets)

    def size(self, split: Split) -> int | None:
        """Return the tasks of all sets; None if one has no end."""
        sizes = [one.source.size(split) for one in self.sets]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        """Return tasks of the sets in order; the last one may go on past its size."""
        found: list[Task] = []
        for one in self.sets:
            size = None if one is self.sets[-1] else one.source.size(split)
            here = count - len(found) if size is None else max(0, min(count - len(found), size - start))
            found += one.tasks(split, start, here)
            start = max(0, start - (size or 0))
        return found

    def spread(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first `count` tasks: equally many of each set, as far as they have them."""
        return _spread(self.sets, split, count)

    def of_eval(self, table: EvalTable) -> Sequence[TaskSet]:
        """Return the sets of an evaluation."""
        own = table.name if table.layered else ""
        return [one for one in self._every if one.arm.evaluation == own and table.covers(one.config.task_set)]

    def evaluated(self, table: EvalTable) -> Sequence[Task]:
        """Return the tasks of an evaluation: equally many of each of its sets, as far as they have them."""
        return _spread(self.of_eval(table), table.split, table.count)

    def oracle(self, task: Task) -> Oracle:
        return self.of(task).source.oracle(task)

    def row(self, task: Task) -> Mapping[str, Any]:
        return self.of(task).source.row(task)

    def examples(self) -> Sequence[Task]:
        """Return tasks that represent all others in what they need of a sandbox."""
        return [task for one in self._every for task in one.examples()]

    def of(self, task: Task) -> TaskSet:
        """Return the set of a task; raise TaskError."""
        if task.part not in self._by_part:
            raise TaskError(f"task {task.id} does not come from this source: no task set {task.part!r}")
        return self._by_part[task.part]


def _spread(sets: Sequence[TaskSet], split: Split, count: int) -> Sequence[Task]:
    """Return the first tasks of each set, set by set."""
    shares = _shares([one.size(split) for one in sets], count)
    return [task for one, share in zip(sets, shares, strict=True) for task in one.tasks(split, 0, share)]


def _shares(sizes: Sequence[int | None], count: int) -> list[int]:
    """Return how many of `count` tasks are of each set, by their sizes."""
    taken = [0] * len(sizes)
    while left := count - sum(taken):
        more = [n for n, size in enumerate(sizes) if size is None or taken[n] < size]
        if not more:
            break
        each = max(1, left // len(more))
        for n in more[:left]:
            taken[n] = min(taken[n] + each, sizes[n] or taken[n] + each)
    return taken


def schedule(weights: Sequence[float]) -> Callable[[int], tuple[int, int]]:
    """Return a function from the number of a draw to its set, and the number of the draw within that set.

    The next draw is of the set that is furthest behind its share by weight: a pure function of the weights.
    """
    total, drawn, places = sum(weights), [0] * len(weights), list[tuple[int, int]]()

    def place(draw: int) -> tuple[int, int]:
        while len(places) <= draw:
            owed = [
                weight / total * (len(places) + 1) - had for weight, had in zip(weights, drawn, strict=True)
            ]
            chosen = max(range(len(weights)), key=lambda number: (weights[number] > 0, owed[number]))
            places.append((chosen, drawn[chosen]))
            drawn[chosen] += 1
        return places[draw]

    return place
