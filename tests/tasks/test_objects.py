"""Tasks as a list, an iterator, a function, an entry of the registry, and Parquet files."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from insitu.config import load_config
from insitu.errors import ConfigError, SetupError, TaskError
from insitu.grading.runners.find import runner_for
from insitu.tasks.base import UNTESTED, TaskSource
from insitu.tasks.factory import open_rows, open_source
from insitu.tasks.toy import ToySource
from insitu.types import Case, FileEntry, GradingPlan, Limits, Oracle, Task
from insitu_lab.testing import TaskSourceContract

LIMITS = Limits(wall_s=33)


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"t{number}",
        "prompt": f"Fix number {number}.",
        "files": {"m.py": f"def f(x):\n    return x  # {number}\n"},
        "entry": "m.py",
        "cases": [{"function": "f", "args": [1], "expected": 2}],
        "gold": {"m.py": "def f(x):\n    return 2 * x\n"},
        **more,
    }


def untested(number: int) -> Task:
    files = {"m.py": FileEntry(content=b"x = %d\n" % number)}
    return Task(id=f"u{number}", prompt=f"Do {number}.", files=files)


def graded(number: int) -> tuple[Task, Oracle]:
    files = {"m.py": FileEntry(content=b"def f(x):\n    return x\n")}
    task = Task(id=f"o{number}", prompt=f"Do {number}.", files=files, grading=GradingPlan(entry="m.py"))
    return task, Oracle(task_id=task.id, cases=(Case(function="f", args=(1,), expected=2),))


def judge(rollout: object) -> float:
    return 0.5


def opened(source: object, **keys: object) -> TaskSource:
    tables = {"tasks.source": source, **{name.replace("__", "."): value for name, value in keys.items()}}
    return open_source(load_config(None, tables), LIMITS, runner_for)


def endless() -> Iterator[dict[str, Any]]:
    return (row(number) for number in itertools.count())


class TestList(TaskSourceContract):
    @pytest.fixture
    def source(self) -> TaskSource:
        return opened([row(number) for number in range(20)])


class TestEndlessIterator(TaskSourceContract):
    @pytest.fixture
    def source(self) -> TaskSource:
        return opened(endless)


class TestIterator(TaskSourceContract):
    @pytest.fixture
    def source(self) -> TaskSource:
        source = opened(iter([row(number) for number in range(12)]))
        source.tasks("train", 0, 12)  # reads it to the end
        return source


def test_a_list_holds_rows_tasks_and_pairs() -> None:
    mixed = [row(1), untested(2), graded(3)]
    source = opened(mixed, tasks__eval_share=0.0, reward__function=judge)
    assert (source.size("train"), source.size("eval")) == (3, 0)
    found = {task.id: task for task in source.tasks("train", 0, 3)}
    assert {name: task.grading.runner for name, task in found.items()} == {
        "t1": "json_io",
        "u2": UNTESTED,
        "o3": "json_io",
    }
    assert {task.limits for task in found.values()} == {LIMITS}
    assert source.row(found["t1"])["prompt"] == "Fix number 1."
    assert source.row(found["u2"]) == {}
    assert source.oracle(found["o3"]).cases


def test_a_task_without_tests_needs_a_reward_function() -> None:
    for entry in (untested(1), {"id": "t", "prompt": "p", "files": {"a": ""}}):
        with pytest.raises(TaskError, match=r"needs exactly one of cases|task u1 has no hidden tests"):
            opened([entry])
        assert opened([entry], reward__function=judge, tasks__eval_share=0.0).size("train") == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ([3], "tasks.source:1: int is not a Task"),
        ([graded(1)[0], row(1)], "tasks.source:1: task o1 has no hidden tests"),
        ([row(1), row(1)], "duplicate id, also in tasks.source:1"),
        ([], "holds no task"),
        (3, "tasks.source: object:int-[0-9]+ is a int, not a TaskSource"),
        (lambda: 1 / 0, "tasks.source: .* raised ZeroDivisionError"),
    ],
)
def test_entries_that_cannot_be_used(source: object, error: str) -> None:
    with pytest.raises((TaskError, ConfigError), match=error):
        opened(source)


def test_an_iterator_is_read_as_it_is_needed() -> None:
    read: list[int] = []

    def tasks() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            read.append(number)
            yield row(number)

    source = opened(tasks, tasks__eval_share=0.0)
    assert (read, source.size("train"), source.size("eval")) == ([], None, 0)
    assert [task.id for task in source.tasks("train", 2, 2)] == ["t2", "t3"]
    assert len(read) == 4
    source = opened(iter([row(1), row(1, prompt="other")]), tasks__eval_share=0.0)
    with pytest.raises(TaskError, match="tasks.source:2: the id t1 was used before"):
        source.tasks("train", 0, 2)

    def broken() -> Iterator[dict[str, Any]]:
        raise ValueError("no table")
        yield row(1)

    with pytest.raises(TaskError, match=r"raised ValueError\('no table'\) \(test_objects.py line"):
        opened(broken, tasks__eval_share=0.0).tasks("train", 0, 1)


def test_a_file_with_tasks_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(f"TASKS = [{row(1)!r}]\ndef more():\n    yield from TASKS\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("TASKS", "more"):
        source = opened(f"{tmp_path}/mine.py:{name}", tasks__eval_share=0.0)
        assert [task.id for task in source.tasks("train", 0, 1)] == ["t1"]


def test_a_source_object_is_used_as_it_is() -> None:
    toy = ToySource(LIMITS, seed=5)
    assert opened(toy) is toy
    assert opened(lambda: toy) is toy


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 2) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)


def test_rows_of_parquet_files(tmp_path: Path) -> None:
    plain = [{k: v for k, v in row(n).items() if k not in ("files", "gold")} for n in range(5)]
    rows = [{**one, "files": {"m.py": "x"}} for one in plain]
    write_parquet(tmp_path / "a.parquet", rows[:3])
    write_parquet(tmp_path / "b.parquet", rows[3:])
    read = open_rows(
        load_config(None, ["tasks.source=jsonl", f"tasks.path={tmp_path / 'a.parquet'}"]), LIMITS, runner_for
    )
    assert [item.task.prompt for item in read.every()] == [f"Fix number {n}." for n in range(3)]
    read = open_rows(load_config(None, ["tasks.source=jsonl", f"tasks.path={tmp_path}"]), LIMITS, runner_for)
    assert [item.task.id for item in read.every()] == [f"t{n}" for n in range(5)]


def test_what_is_wrong_with_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={path}"])
    path.write_text(json.dumps(row(1)))
    with pytest.raises(TaskError, match=r"a.parquet: not a Parquet file"):
        open_rows(config, LIMITS, runner_for)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"Parquet files need pyarrow; .*\[parquet\]"):
        open_rows(config, LIMITS, runner_for)
