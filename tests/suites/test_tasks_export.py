"""`insitu tasks export` writes tasks as rows that load again as the same tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.cli import main
from insitu.config import load_config
from insitu.grading.runners.find import runner_for
from insitu.tasks.factory import open_rows
from insitu.tasks.toy import ToySource
from insitu.types import Limits


def test_exported_toy_tasks_are_the_same_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "toy.jsonl"
    assert main(["tasks", "export", "--limit", "6", "--out", str(out), "tasks.source=toy"]) == 0
    assert "6 tasks written to" in capsys.readouterr().err
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={out}"])
    read = {item.task.content_hash: item for item in open_rows(config, Limits(), runner_for).every()}
    toy = ToySource(Limits())
    tasks = toy.tasks("train", 0, 6)
    assert set(read) == {task.content_hash for task in tasks}
    assert all(read[task.content_hash].oracle == toy.oracle(task) for task in tasks)
