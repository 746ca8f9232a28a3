"""Where tasks come from: a TaskSource gives tasks, and their oracles apart, to whoever may hold each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from whet.types import Oracle, Task

Split = Literal["train", "eval"]


class TaskSource(Protocol):
    """A named, finite or endless, deterministic supply of tasks."""

    @property
    def name(self) -> str: ...

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        """Tasks `start .. start+count` of a split; the same arguments give the same tasks.
        The splits share no content hash. Raises TaskError when the split has fewer."""

    def oracle(self, task: Task) -> Oracle:
        """The oracle of a task. Called by the grading side only."""
