"""The task source contract, over generated tasks and a data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.tasks.base import TaskSource
from insitu.tasks.factory import open_source
from insitu.types import Limits
from insitu_lab.testing import TaskSourceContract


class TestToySource(TaskSourceContract):
    """Endless generated tasks."""

    @pytest.fixture
    def source(self) -> TaskSource:
        return open_source(load_config(), Limits(), lambda task, oracle: None)


class TestRows(TaskSourceContract):
    """Rows of a JSONL file."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> TaskSource:
        rows = [
            {
                "id": f"row-{n}",
                "prompt": f"Make f return {n}.",
                "files": {"app.py": "def f():\n    return None\n"},
                "entry": "app.py",
                "cases": [{"function": "f", "args": [], "expected": n}],
            }
            for n in range(12)
        ]
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = load_config(overrides=["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=0.3"])
        return open_source(config, Limits(), lambda task, oracle: None)
