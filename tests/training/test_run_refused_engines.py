"""A training run with an engine that cannot serve one, or tasks judged too weakly, is refused at once."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, TaskError
from insitu.progress.plain import PlainView
from insitu.storage.run_dir import RunDir
from insitu_train.loop import TrainOptions
from insitu_train.run import run_training

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "engine", [{"kind": "upstream", "urls": "http://127.0.0.1:9", "model": "m"}, {"kind": "external"}]
)
def test_an_engine_without_log_probabilities_is_refused(tmp_path: Path, engine: dict[str, str]) -> None:
    config = load_config(base={"run": {"dir": str(tmp_path / "run")}, "engine": engine})
    line = rf"^engine.kind {engine['kind']}: a training run samples with embedded, .* a log-probability for"
    with pytest.raises(ConfigError, match=line):
        asyncio.run(run_training(config, PlainView(StringIO()), TrainOptions()))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    """With a model that is not there, so that whatever is started fails."""
    folder, shown = tmp_path / "run", StringIO()
    config = load_config(None, [f"run.dir={folder}", f"model.path={tmp_path / 'gone'}"])
    with RunDir.create(config) as run:
        run.store().close()
        with pytest.raises(ConfigError, match="gone is not a model folder"):
            asyncio.run(run_training(config, PlainView(StringIO()), TrainOptions(resume=folder)))
        run.write_summary({"rl_steps": 3})
    assert asyncio.run(run_training(config, PlainView(shown), TrainOptions(resume=folder))) == {"rl_steps": 3}
    assert "is finished, nothing to do" in shown.getvalue()


def test_tasks_that_are_judged_weaker_than_asked_for_are_refused(tmp_path: Path) -> None:
    row = {"id": "t", "prompt": "Fix.", "files": {"m.py": "x = 1\n"}, "checks": [{"command": "true"}]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    base = {"run": {"dir": str(tmp_path / "run")}, "tasks": {"source": "jsonl", "path": str(path)}}
    config = load_config(base={**base, "grade": {"min_trust": "standard"}})
    line = "^grade.min_trust = standard: 1 of 1 tasks are less trusted, the first: task t, weak"
    with pytest.raises(TaskError, match=line):
        asyncio.run(run_training(config, PlainView(StringIO()), TrainOptions()))
    assert not (tmp_path / "run").exists()
