"""A user's own agent, tasks and reward train the model: from one Python file and from one TOML file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import insitu

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TASKS = {"area", "total", "change", "margin", "quota"}


def check(run: insitu.Run, steps: int) -> None:
    assert [step.step for step in run.steps] == list(range(1, steps + 1))
    assert run.ledger.balanced
    assert run.ledger.trained > 0
    rollouts = run.rollouts(phase="train")
    assert len(rollouts) == 8 * steps
    assert {rollout.task_id for rollout in rollouts} <= TASKS
    graded = [rollout for rollout in rollouts if rollout.reward is not None]
    assert graded
    for rollout in graded:
        parts = rollout.reward_components
        assert set(parts) == {"solved", "short"}
        assert rollout.reward == pytest.approx(sum(parts.values()))
        assert parts["short"] < 0.0  # there was a transcript
        assert rollout.turns


def test_from_one_python_file(tmp_path: Path) -> None:
    command = [sys.executable, "examples/own/own.py", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2
    check(insitu.open_run(tmp_path / "run"), 2)


def test_from_one_toml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = {"run.dir": str(tmp_path / "run"), "run.steps": 1}
    check(insitu.train("examples/own/own.toml", overrides=overrides), 1)
