"""Tasks that an environment can be reset to: those of its configuration, and those that a caller defines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from insitu.config import Config
from insitu.errors import ConfigError, TaskError
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.runtime.sandboxes import check_tasks
from insitu.tasks.base import ENDLESS_TASKS, Split, TaskSource
from insitu.tasks.factory import open_source
from insitu.tasks.shared import home_root
from insitu.types import Check, FailingCheck, GradingPlan, HiddenTests, Oracle, Setup, Task, task_hash
from insitu_bridges.tasks_by_id import TasksById


class EpisodeTasks:
    """The tasks of a configuration by id or index; implements `insitu.tasks.base.TaskSource`.

    A caller's own task is known from `define` to `forget`; its checks are held here only.
    """

    def __init__(self, config: Config) -> None:
        """Open the task source. Raises ConfigError, TaskError."""
        if config.reward.function:
            raise ConfigError("reward.function needs a trajectory: an environment grades by hidden tests")
        self._config = config
        self.source: TaskSource = open_source(config, limits_of(config), runner_for)
        self._by_id = TasksById(self.source)
        self._defined: dict[str, Oracle] = {}

    @property
    def name(self) -> str:
        return self.source.name

    def size(self, split: Split) -> int:
        """Return how many tasks a split has; ENDLESS_TASKS for an endless source."""
        size = self.source.size(split)
        return ENDLESS_TASKS if size is None else size

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return self.source.tasks(split, start, count)

    def at(self, split: Split, index: int) -> Task:
        """Return a task by index; raise TaskError out of range."""
        if not 0 <= index < self.size(split):
            raise TaskError(f"{self.name} has {self.size(split)} tasks in split {split}; asked for {index}")
        return self.tasks(split, index, 1)[0]

    def find(self, task_id: str) -> Task:
        """Return a task by id; raise TaskError."""
        return self._by_id.find(task_id)

    def define(
        self, name: str, instruction: str, setup: Sequence[str], verify: Sequence[str], *, image: str = ""
    ) -> Task:
        """Return a task of shell commands: `setup` makes the work folder, `verify` grades a copy of it.

        /home/user, if they name it, is graded too. The reward is the share of `verify` that passes.
        Raises TaskError, ConfigError.
        """
        workdir, texts = "" if image else Setup().workdir, (instruction, *setup, *verify)
        initial = Setup(image=image, workdir=workdir, commands=tuple(setup), roots=home_root(texts, workdir))
        grading = GradingPlan(runner="command", reward="fraction", timeout_s=self._config.grade.timeout_s)
        task = Task(
            id=name, prompt=instruction, files={}, setup=initial, grading=grading, category="caller",
            limits=limits_of(self._config), content_hash=task_hash(instruction, {}, grading, initial),
        )  # fmt: skip
        checks = tuple(Check(name=f"verify {at}", command=command) for at, command in enumerate(verify, 1))
        oracle = Oracle(task_id=name, tests=HiddenTests(checks=checks))
        runner_for(task, oracle)
        check_tasks(self._config, [task])
        self._defined[name] = oracle
        return task

    def checks(self, task: Task) -> Sequence[str]:
        """Return the verify commands of a task of `define`; none for others, whose checks are hidden."""
        defined = self._defined.get(task.id)
        return [check.command for check in defined.tests.checks] if defined else []

    def limited(self, task: Task, wall_s: float) -> Task:
        """Return the task with a lower limit of wall time."""
        return replace(task, limits=task.limits.changed(wall_s=min(wall_s, task.limits.wall_s)))

    def forget(self, task: Task) -> None:
        """Drop a task of `define`; others stay."""
        self._defined.pop(task.id, None)

    def oracle(self, task: Task) -> Oracle:
        return self._defined.get(task.id) or self.source.oracle(task)

    def row(self, task: Task) -> Mapping[str, Any]:
        return {} if task.id in self._defined else self.source.row(task)


def verified(count: int, passed: int, failing: Sequence[FailingCheck]) -> Sequence[FailingCheck | None]:
    """Return for each of a caller's verify commands why it failed, None where it passed.

    After one that ran out of time the others are not run, and only the first failures are recorded.
    """
    names = [f"verify {at}" for at in range(1, count + 1)]
    by_name = {check.name: check for check in failing}
    known = max((at for at, name in enumerate(names) if name in by_name), default=-1)
    rest = None if passed + len(by_name) == count else FailingCheck(name="", outcome="not known")
    return [by_name.get(name, rest if at > known else None) for at, name in enumerate(names)]


def described(split: Split, index: int, task: Task) -> Mapping[str, Any]:
    """Return what OpenEnv's task routes say about a task: nothing about how it is graded."""
    return {
        "id": task.id,
        "split": split,
        "index": index,
        "instruction": task.prompt,
        "category": task.category,
        "image": task.setup.image,
        "limits": task.limits.model_dump(),
    }
