"""A run can refuse verdicts that are worth too little, and says aloud when agents tamper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.attempt import AttemptSpec
from insitu.config import load_config
from insitu.errors import TaskError
from insitu.grading.grader import Grader
from insitu.grading.judge import TaskJudge
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.runtime.preflight import filter_by_trust
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Split
from insitu.tasks.factory import open_source
from insitu.types import FileEntry, Outcome, Rollout, Task, Trust, Verdict
from insitu_train.alarms import verdict_counts
from tests.fakes.attempts import fake_rollout

BASE = "def f(x):\n    return x\n"
PLAIN = "from m import f\n\n\ndef test_f():\n    assert f(1) == 2\n"
OPAQUE = "from m import f\n\n\ndef test_f():\n    if f(1) != 2:\n        raise ValueError\n"


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "prompt": f"Fix {name}.", "files": {"m.py": BASE}} | more


def by_test(name: str, source: str) -> dict[str, Any]:
    return row(name, tests={"test_m.py": source}, fail_to_pass=["test_m.py::test_f"])


ROWS = [
    row("cases", entry="m.py", cases=[{"function": "f", "args": [1], "expected": 2}]),
    by_test("turned", PLAIN),
    by_test("opaque", OPAQUE),
    row("command", checks=[{"command": "python3 -c 'import m; assert m.f(1) == 2'"}]),
]


def held(tmp_path: Path, least: Trust, *more: str) -> tuple[set[str], list[str]]:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    given = ["tasks.source=jsonl", f"tasks.path={path}", f"grade.min_trust={least}", *more]
    config = load_config(None, given)
    source, said = open_source(config, limits_of(config), runner_for), list[str]()
    filter_by_trust(config, source, said.append)
    splits: tuple[Split, ...] = ("train", "eval")
    names = {task.id for split in splits for task in source.tasks(split, 0, source.size(split) or 0)}
    return names, said


def test_by_default_everything_is_taken(tmp_path: Path) -> None:
    assert held(tmp_path, "weak") == ({"cases", "turned", "opaque", "command"}, [])


def test_what_is_judged_weaker_stops_the_run_or_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        held(tmp_path, "standard")
    said = str(caught.value)
    assert said.startswith("grade.min_trust = standard: 2 of 4 tasks are less trusted, the first: task ")
    assert said.endswith("; set tasks.on_invalid_row=skip to skip them")
    names, (line,) = held(tmp_path, "standard", "tasks.on_invalid_row=skip")
    assert names == {"cases", "turned"}
    assert "task opaque, weak: no assertion of test_m.py can be turned round" in line or (
        "task command, weak: runner command" in line
    )
    assert held(tmp_path, "strong", "tasks.on_invalid_row=skip")[0] == {"cases"}


@pytest.mark.slow
async def test_a_verdict_that_turns_out_too_weak_is_none(tmp_path: Path) -> None:
    """What the files of an image hold is known when a verdict is made, not before."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(by_test("opaque", OPAQUE)) + "\n")
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=1"])
    source = open_source(config, limits_of(config), runner_for)
    (task,) = source.tasks("eval", 0, 1)
    solved = {**task.files, "m.py": FileEntry(content=BASE.replace("x\n", "x + 1\n").encode())}
    grader = Grader(LocalBackend())
    assert (await TaskJudge(grader, source)(task, solved)).reward == 1.0
    verdict = await TaskJudge(grader, source, "standard")(task, solved)
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert verdict.reason == "grade.min_trust = standard: the verdict is weak"


def rollout(task: str, outcome: Outcome, dropped: tuple[str, ...] = ()) -> Rollout:
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=Task(id=task, prompt="", files={}), seed=1)
    reward = None if outcome is Outcome.INFRA else 0.0
    verdict = Verdict(outcome=outcome, reward=reward, trust="weak", dropped_paths=dropped)
    return replace(fake_rollout(spec, 0.0), verdict=verdict)


def test_a_step_in_which_agents_tamper_says_so() -> None:
    fair = [rollout("a", Outcome.UNRESOLVED, ("conftest.py",))] * 7
    lost = [rollout("a", Outcome.INFRA)] * 20
    metrics, alarm = verdict_counts([*fair, *lost, rollout("b", Outcome.TAMPERED)], 0.1)
    assert metrics == {"tampered": 1, "tamper_rate": 1 / 8, "tamper_alarm": True, "dropped": 7, "weak": 8}
    assert alarm == "1 of 8 rollouts were judged tampered; most of task b (1)"
    assert verdict_counts([*fair, rollout("b", Outcome.TAMPERED)], 0.2)[1] == ""
    assert verdict_counts([*fair, rollout("b", Outcome.TAMPERED)], 0.0)[1] == ""
    assert verdict_counts([rollout("b", Outcome.TAMPERED)] * 7, 0.1)[1] == ""
    assert verdict_counts([], 0.1)[0]["tamper_rate"] == 0.0
