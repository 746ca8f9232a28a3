"""A taskset of verifiers and an environment of OpenEnv, for the real packages and for stand-ins."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from insitu.config import Config, load_config
from insitu.grading.runners.find import runner_for
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import open_rows
from insitu.types import FileEntry, FinishedRollout, Limits, Outcome, Status, Task, Verdict
from insitu_tasksets import openenv, verifiers

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace):
        return float(trace.last_reply == str(task.answer))

    @vf.reward
    async def brief(self, trace):
        return 0.5 if len(trace.last_reply) < 4 else 0.0
{more}

class Sums(vf.Taskset[Sum]):
    def load(self):
        for n in range(8):
            data = Data(prompt=f"What is {{n}} + {{n}}?", system_prompt="Add.", answer=2 * n)
            yield Sum(data, self.config.task)

__all__ = ["Sums"]
"""
LIVE = {
    "setup": "\n    async def setup(self, trace, runtime):\n        pass\n",
    "in_box": "\n    @vf.reward\n    async def in_box(self, runtime):\n        return 1.0\n",
}


@contextmanager
def taskset(folder: Path, name: str, more: str = "") -> Iterator[str]:
    """An installed taskset with this id."""
    (folder / f"{name}.py").write_text(TASKSET.format(more=more))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield name
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)
        verifiers._tasks.cache_clear()


def config(source: str, path: str, *more: str) -> Config:
    return load_config(
        None, [f"tasks.source={source}", f"tasks.path={path}", f"reward.function={source}", *more]
    )


def rows(source: str, path: str, *more: str) -> RowSource:
    openenv._action_schema.cache_clear()
    return open_rows(config(source, path, *more), Limits(), runner_for)


def finished(source: RowSource, task: Task, answer: str) -> FinishedRollout:
    verdict = Verdict(outcome=Outcome.UNRESOLVED, reward=0.0, trust="weak")
    return FinishedRollout(
        id="r", task=task, row=source.row(task), files={"answer.txt": FileEntry(content=answer.encode())},
        diff="", transcript="", turns=(), status=Status.OK, verdict=verdict,
    )  # fmt: skip


def check_verifiers(folder: Path) -> None:
    """The contract of format and reward, with whichever package `verifiers` is importable."""
    with taskset(folder, "sums_of_a_test") as name:
        source = rows("verifiers", name, "tasks.eval_share=0.25")
        items = list(source.every())
        assert len(items) == 8
        task = items[3].task
        assert task.id == "sums_of_a_test-3"
        assert task.prompt.startswith("Add.\n\nWhat is 3 + 3?\n\nPut your answer into the file answer.txt")
        assert (task.grading.runner, list(task.files)) == ("host_reward", ["answer.txt"])
        for answer, wanted in (
            ("6", (2.0, 0.5)),
            ("7", (0.0, 0.5)),
            ("a guess: 6", (0.0, 0.0)),
            ("", (0.0, 0.5)),
        ):
            given = asyncio.run(verifiers.reward(finished(source, task, f"{answer}\n")))
            assert given == dict(zip(("right", "brief"), wanted, strict=True)), answer
        (folder / "sums.toml").write_text(f'id = "{name}"\n')
        assert len(list(rows("verifiers", str(folder / "sums.toml")).every())) == 8
    for number, (what, more) in enumerate(LIVE.items()):
        with (
            taskset(folder, f"live_of_a_test_{number}", more) as name,
            pytest.raises(Exception, match=f"verifiers task Sum: .*{what}.* needs its sandbox"),
        ):
            rows("verifiers", name)


def check_openenv(url: str, folder: Path) -> None:
    """The contract of format and reward against a server of the environment Guess, with three tasks."""
    source = rows("openenv", url)
    tasks = [item.task for item in source.every()]
    assert [task.id for task in tasks] == ["train-0", "train-1", "train-2"]
    assert '"hint": "between 0 and 9"' in tasks[1].prompt
    assert '"number"' in tasks[1].prompt
    assert {task.grading.runner for task in tasks} == {"none"}

    def reward(answer: str) -> Any:
        return asyncio.run(openenv.reward(finished(source, tasks[1], answer)))

    # Task 1 wants 4; each step costs 0.1.
    assert reward('{"number": 4}') == pytest.approx(0.9)
    assert reward("4") == pytest.approx(0.9)
    assert reward("```json\n4\n```") == pytest.approx(0.9)
    assert reward('[{"number": 1}, {"number": 4}, {"number": 9}]') == pytest.approx(0.8)
    assert reward("7") == pytest.approx(-0.1)
    assert reward("no number") == 0.0
    assert reward("") == 0.0
    file = folder / "guess.toml"
    file.write_text(f'url = "{url}"\nresets = [{{index = 2, split = "train"}}]\n')
    assert [item.task.id for item in rows("openenv", str(file)).every()] == ["train-2"]
    file.write_text(f'url = "{url}"\nsplit = "test"\n')
    with pytest.raises(Exception, match="no task in split 'test', of train"):
        rows("openenv", str(file))
