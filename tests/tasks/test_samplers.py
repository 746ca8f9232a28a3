"""The order of training tasks is that of the configured sampler."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, TaskError
from insitu.tasks.samplers import task_sampler
from insitu.tasks.toy import ToySource
from insitu.types import Limits

MINE = """
def backwards(draws, size, seed):
    return 9 - draws
def wrong(draws, size, seed):
    return draws / 2
def broken(draws, size, seed):
    return draws[7]
"""


def test_each_draw_is_the_next_task_by_default() -> None:
    source = ToySource(Limits())
    draw = task_sampler(load_config(None), source)
    assert [draw(number).id for number in (0, 3)] == [source.tasks("train", n, 1)[0].id for n in (0, 3)]


def test_a_sampler_of_the_user_chooses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    source = ToySource(Limits())
    draw = task_sampler(load_config(None, [f"tasks.sampler={tmp_path}/mine.py:backwards"]), source)
    assert draw(2) == source.tasks("train", 7, 1)[0]
    with pytest.raises(TaskError, match="backwards returned .* expected an index"):
        draw(10)
    with pytest.raises(TaskError, match="wrong returned .* expected an index"):
        task_sampler(load_config(None, [f"tasks.sampler={tmp_path}/mine.py:wrong"]), source)(1)
    with pytest.raises(TaskError, match=r"mine.py:broken raised IndexError\(.*mine.py line 7"):
        task_sampler(load_config(None, [f"tasks.sampler={tmp_path}/mine.py:broken"]), source)(1)
    with pytest.raises(ConfigError, match="unknown name 'epoch' of kind samplers; did you mean epochs"):
        load_config(None, ["tasks.sampler=epoch"])
