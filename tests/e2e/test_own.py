"""A user's own agent, tasks and reward train the model: from one Python file and from one TOML file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import insitu
from tests.fakes.provider import KEY, serve_provider

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ["run.steps=1", "collect.group_size=2"]  # each rollout imports the SDK of a vendor: a second
TASKS = {"area", "total", "change", "margin", "quota"}


def check(run: insitu.Run) -> None:
    assert [step.step for step in run.steps] == [1]
    assert run.ledger.balanced
    assert run.ledger.trained > 0
    rollouts = run.rollouts(phase="train")
    assert len(rollouts) == 4
    assert {rollout.task_id for rollout in rollouts} <= TASKS
    graded = [rollout for rollout in rollouts if rollout.reward is not None]
    assert graded
    for rollout in graded:
        parts = rollout.reward_components
        assert set(parts) == {"solved", "short"}
        assert rollout.reward == pytest.approx(sum(parts.values()))
        assert parts["short"] < 0.0  # there was a transcript
        assert rollout.turns


@pytest.mark.full
def test_from_one_python_file(tmp_path: Path) -> None:
    command = [sys.executable, "examples/own/own.py", f"run.dir={tmp_path / 'run'}", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 1
    check(insitu.open_run(tmp_path / "run"))


def test_from_one_toml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [f"run.dir={tmp_path / 'run'}", "gateway.tools=examples/own/guard.py:guard", *SMALL]
    check(insitu.train("examples/own/own.toml", overrides=overrides))


async def test_a_group_is_ranked_by_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped group judge, at a fake endpoint: its scores are the rewards that are trained on."""

    def rank(body: Any) -> dict[str, str]:
        rules, material = (message["content"] for message in body["messages"])
        (mark,) = set(re.findall(r'"mark" is (\w+)', rules))
        names = re.findall(rf"^<(candidate-\d+) {mark}>$", material, re.MULTILINE)
        scores = {name: number for number, name in enumerate(names, 1)}
        return {"content": json.dumps({"mark": mark, "why": "", "scores": scores})}

    monkeypatch.chdir(ROOT)
    async with serve_provider() as provider:
        provider.replies = rank
        for name, value in {"URL": f"{provider.url}/v1", "KEY": KEY, "MODEL": "judge"}.items():
            monkeypatch.setenv(f"JUDGE_{name}", value)
        monkeypatch.setenv("JUDGE_CACHE", str(tmp_path / "cache"))
        reward = ["reward.function=ranking", "reward.group=true"]
        overrides = [f"run.dir={tmp_path / 'run'}", *reward, *SMALL]
        run = await insitu.train_async("examples/own/own.toml", overrides=overrides)
        assert run.ledger.balanced
        rollouts = [r for r in run.rollouts(phase="train") if r.reward is not None]
        assert len(rollouts) == 4
        assert {r.reward for r in rollouts} <= {0.1, 0.2}
        assert all(r.reward_components == {"judged": r.reward} for r in rollouts)
        calls = (tmp_path / "cache" / "calls.jsonl").read_text().splitlines()
        assert len(calls) == len(provider.received) <= 2, "one question for each of two groups"
