"""The order of training tasks is that of the configured sampler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, TaskError
from insitu.tasks.base import TaskSource
from insitu.tasks.mix import TaskMix, TaskSet
from insitu.tasks.samplers import task_sampler
from insitu.tasks.toy import ToySource
from insitu.types import Limits, Task

MINE = """
def backwards(draws, size, seed):
    return 9 - draws
def wrong(draws, size, seed):
    return draws / 2
def broken(draws, size, seed):
    return draws[7]
"""


def draws(source: TaskSource, *overrides: str) -> Callable[[int], Task]:
    return task_sampler(TaskMix([TaskSet(config=load_config(None, overrides), source=source)]))


def test_each_draw_is_the_next_task_by_default() -> None:
    source = ToySource(Limits())
    draw = draws(source)
    assert [draw(number).id for number in (0, 3)] == [source.tasks("train", n, 1)[0].id for n in (0, 3)]


def test_a_sampler_of_the_user_chooses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    source = ToySource(Limits())
    draw = draws(source, f"tasks.sampler={tmp_path}/mine.py:backwards")
    assert draw(2) == source.tasks("train", 7, 1)[0]
    with pytest.raises(TaskError, match="backwards returned .* expected an index"):
        draw(10)
    with pytest.raises(TaskError, match="wrong returned .* expected an index"):
        draws(source, f"tasks.sampler={tmp_path}/mine.py:wrong")(1)
    with pytest.raises(TaskError, match=r"mine.py:broken raised IndexError\(.*mine.py line 7"):
        draws(source, f"tasks.sampler={tmp_path}/mine.py:broken")(1)
    with pytest.raises(ConfigError, match="unknown name 'epoch' of kind samplers; did you mean epochs"):
        load_config(None, ["tasks.sampler=epoch"])
