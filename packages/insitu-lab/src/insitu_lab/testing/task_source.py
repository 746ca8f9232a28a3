"""Contract of a source of tasks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from insitu.errors import TaskError
from insitu.tasks.base import REWARD_ONLY, Split, TaskSource
from insitu.types import Task, Tree, task_hash

COUNT = 40
"""Tasks that each test loads from a split, where there are as many."""


def hidden_texts(*trees: Tree) -> set[bytes]:
    """Return file contents that are long enough to be recognised elsewhere."""
    return {entry.content.strip() for tree in trees for entry in tree.values() if len(entry.content) > 40}


class TaskSourceContract:
    """Subclass it and define the fixture `source`, a `TaskSource` with at least one training task."""

    def load(self, source: TaskSource, split: Split) -> list[Task]:
        size = source.size(split)
        return list(source.tasks(split, 0, COUNT if size is None else min(size, COUNT)))

    def load_all(self, source: TaskSource) -> list[Task]:
        return [*self.load(source, "train"), *self.load(source, "eval")]

    def test_tasks_are_deterministic(self, source: TaskSource) -> None:
        assert self.load_all(source) == self.load_all(source)
        tasks = self.load(source, "train")
        assert tasks
        assert [source.tasks("train", index, 1)[0] for index in range(len(tasks))] == tasks

    def test_ids_are_unique(self, source: TaskSource) -> None:
        ids = [task.id for task in self.load_all(source)]
        assert len(ids) == len(set(ids))

    def test_the_content_hash_is_that_of_the_content(self, source: TaskSource) -> None:
        for task in self.load_all(source):
            assert task.content_hash == task_hash(
                task.prompt, task.files, task.grading, task.setup, task.steps
            ), task.id

    def test_splits_share_no_task(self, source: TaskSource) -> None:
        train, held_out = (
            {task.content_hash for task in self.load(source, split)} for split in ("train", "eval")
        )
        assert not train & held_out

    def test_a_finite_training_split_repeats(self, source: TaskSource) -> None:
        size = source.size("train")
        if size is None:
            return
        once = {task.content_hash for task in source.tasks("train", 0, size)}
        again = {task.content_hash for task in source.tasks("train", size, size)}
        assert once == again

    def test_the_held_out_split_does_not_repeat(self, source: TaskSource) -> None:
        size = source.size("eval")
        if size is None:
            return
        with pytest.raises(TaskError):
            source.tasks("eval", size, 1)

    def test_a_slice_of_a_split_is_that_part_of_it(self, source: TaskSource) -> None:
        tasks = self.load(source, "train")
        assert list(source.tasks("train", 1, len(tasks) - 1)) == tasks[1:]
        assert list(source.tasks("train", 0, 0)) == []

    def test_rows_are_mappings(self, source: TaskSource) -> None:
        for task in self.load_all(source):
            assert isinstance(source.row(task), Mapping), task.id

    def test_each_task_has_an_oracle(self, source: TaskSource) -> None:
        for task in self.load_all(source):
            oracle = source.oracle(task)
            assert oracle.task_id == task.id
            if task.grading.runner in REWARD_ONLY:  # the reward function decides
                continue
            tests = oracle.tests
            assert oracle.cases or oracle.exchanges or tests.checks or tests.script or tests.fail_to_pass, (
                task.id
            )

    def test_no_task_contains_its_solution(self, source: TaskSource) -> None:
        for task in self.load_all(source):
            oracle = source.oracle(task)
            shown = [task.prompt.encode(), *(entry.content for entry in task.files.values())]
            hidden = hidden_texts(oracle.gold, oracle.tests.files, oracle.solve)
            for secret, text in itertools.product(hidden, shown):
                assert secret not in text, task.id
