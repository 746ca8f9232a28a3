"""Where tasks come from: a TaskSource gives tasks, and their oracles apart, to whoever may hold each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from insitu.errors import TaskError
from insitu.types import Oracle, Task, Trust

Split = Literal["train", "eval"]
UNTESTED = "none"
"""Runner of a task without hidden tests: only a reward function can score it."""
HOST_REWARD = "host_reward"
"""The same, for a function that runs none of the agent's files and believes nothing of its sandbox."""
REWARD_ONLY: Mapping[str, Trust] = {UNTESTED: "weak", HOST_REWARD: "standard"}
"""Runners of tasks that a reward function alone scores, with the trust of its reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One task with its oracle. Made by a loader and taken apart at once: the two travel separately."""

    task: Task
    oracle: Oracle


@runtime_checkable
class TaskSource(Protocol):
    """A named, finite or endless, deterministic supply of tasks."""

    @property
    def name(self) -> str: ...

    def size(self, split: Split) -> int | None:
        """Different tasks of a split; None = no end of them."""

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        """Return tasks `start .. start+count` of a split; the same arguments give the same tasks.

        The splits share no content hash. Past its size the train split begins again, in another order; the
        eval split raises TaskError.
        """

    def oracle(self, task: Task) -> Oracle:
        """Return the oracle of a task; only for the grading side."""

    def row(self, task: Task) -> Mapping[str, Any]:
        """Return the row that the task was made from, for reward functions; empty if it comes from none."""


ENDLESS_TASKS = 4096
"""Tasks of an endless source that are searched for an id."""


def same_task(place: str, task: Task | None, task_id: str, content_hash: str = "") -> Task:
    """Return the task of a stored place; raise TaskError if it has another id or content than it had."""
    if task is None:
        now = "no longer there"
    elif task.id != task_id:
        now = f"now {task.id}"
    elif content_hash not in ("", task.content_hash):
        now = "now with other content"
    else:
        return task
    raise TaskError(
        f"the data set has changed since the run began: {place} was task {task_id}, {now}; restore it"
    )


def split_of(content_hash: str, eval_share: float) -> Split:
    """Which split a task belongs to, by content alone: no order or size of a data set moves it."""
    return "eval" if int(content_hash[:8], 16) < eval_share * 2**32 else "train"
