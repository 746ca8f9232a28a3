"""examples/generic: the three functions of a generic loop score replies and train, in Python and Julia."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.config import load_config
from insitu.errors import TaskError
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.sandbox.local import LocalBackend
from insitu.storage.run_dir import read_store
from insitu.tasks.factory import open_rows
from insitu.types import FileEntry, IntArray, Limits, Message, Outcome, RequestKey, Rollout, task_hash
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PYTHON, JULIA = "examples/generic/python.toml", "examples/generic/julia.toml"
REPLIES = {
    "solved": "Let me see.\n```python\ndef double(x):\n    return 2 * x\n```\nDone.",
    "wrong": "def double(x):\n    return x\n",
    "prose": "I would rather write a poem about doubling.",
    "noise": "```python\n" + "ab " * 30 + "\n```",
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.full
def test_the_toy_model_trains_on_python_tasks(tmp_path: Path) -> None:
    small = [
        "run.steps=2",
        "collect.group_size=4",
        "limits.max_call_tokens=48",
        f"run.dir={tmp_path / 'run'}",
    ]
    run = insitu.train(PYTHON, overrides=small)
    assert [step.step for step in run.steps] == [1, 2]
    assert run.ledger.balanced
    rollouts = run.rollouts(phase="train")
    assert {rollout.task_id for rollout in rollouts} <= {"py-double", "py-area", "py-middle", "py-vowels"}
    for rollout in rollouts:
        assert set(rollout.reward_components) == {"tests", "usable", "length"}
        assert rollout.reward_components["length"] < 0


def scripted(tmp_path: Path, *overrides: str) -> Mapping[str, Rollout]:
    """Rollouts of the task py-double by what was replied."""

    def policy(ids: IntArray, key: RequestKey) -> Message:
        return Message(role="assistant", text=list(REPLIES.values())[int(key.rollout_id.split("/")[-1])])

    @asynccontextmanager
    async def sampler(config: Any, renderer: Any, log: Path, say: object) -> AsyncIterator[Sampler]:
        async def check() -> None: ...

        yield Sampler(engine=ScriptedEngine(renderer, policy, sampled=True), check=check)

    (tmp_path / "one.jsonl").write_text((ROOT / "examples/generic/python.jsonl").read_text().splitlines()[0])
    config = load_config(
        Path(PYTHON),
        [
            f"tasks.path={tmp_path / 'one.jsonl'}", f"run.dir={tmp_path / 'run'}", "rollout.count=1",
            "rollout.split=train", f"rollout.samples={len(REPLIES)}", *overrides,
        ],
    )  # fmt: skip
    asyncio.run(collect_rollouts(config, PlainView(StringIO()), RolloutOptions(sampler=sampler)))
    found = insitu.open_run(tmp_path / "run").rollouts()
    return dict(zip(REPLIES, sorted(found, key=lambda rollout: rollout.id), strict=True))


def test_replies_are_scored_by_tests_and_form(tmp_path: Path) -> None:
    found = scripted(tmp_path)
    parts = {name: rollout.reward_components for name, rollout in found.items()}
    assert {name: (part["tests"], part["usable"]) for name, part in parts.items()} == {
        "solved": (1.0, 0.1),
        "wrong": (0.0, 0.1),
        "prose": (0.0, 0.0),
        "noise": (0.0, 0.0),
    }
    assert "no code" in found["prose"].error
    assert "again and again" in found["noise"].error


def test_a_dead_evaluation_ends_the_run_and_scores_nothing(tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text("def score(rollout):\n    raise ConnectionError('socket is closed')\n")
    with pytest.raises(
        TaskError, match="failed 5 times in a row; the last time it raised Connection.*closed"
    ):
        scripted(tmp_path, f"reward.function={tmp_path / 'dead.py'}:score")
    with read_store(tmp_path / "run") as store:
        assert all(outcome.reward is None for outcome in store.outcomes("rollout", 0))


JULIA_STAND_IN = """#!/usr/bin/python3
# Runs one-line definitions and tests, as Julia would: in the order of the files, until one fails.
import re, sys
assert sys.argv[1] == "--startup-file=no"
names = {}
for line in open(sys.argv[2]).read().splitlines():
    if found := re.fullmatch(r'include\\("(.*)"\\)', line):
        for defined in open(found[1]).read().splitlines():
            if made := re.fullmatch(r"(\\w+)(\\(.*?\\)) = (.*)", defined):
                exec(f"def {made[1]}{made[2]}: return {made[3]}", names)
            elif defined:
                exit("syntax error: " + defined)
    elif line.startswith("@test ") and not eval(line[6:], names):
        exit("test failed: " + line)
    elif found := re.fullmatch(r'println\\("(.*)"\\)', line):
        print(found[1])
"""


async def test_julia_tasks_are_judged_by_their_tests() -> None:
    config = load_config(Path(JULIA), [])
    items = list(open_rows(config, Limits(wall_s=20), runner_for).every())
    assert [item.task.id for item in items] == ["jl-double", "jl-area", "jl-rest"]
    grader = Grader(LocalBackend(), GradeConfig(remember=0, timeout_s=20))
    for item in items:
        files = {**item.task.files, "bin/julia": FileEntry(content=JULIA_STAND_IN.encode(), executable=True)}
        named = task_hash(item.task.prompt, files, item.task.grading, item.task.setup)
        task = replace(item.task, files=files, content_hash=named)
        checks = [
            replace(one, command=f"PATH=$PWD/bin:$PATH; {one.command}") for one in item.oracle.tests.checks
        ]
        oracle = replace(item.oracle, tests=replace(item.oracle.tests, checks=tuple(checks)))
        await grader.validate(task, oracle, repeats=1)
        wrong = files_of("```julia\ndouble(x) = x\n```", task)
        verdict = await grader.grade(task, oracle, {**files, **wrong})
        assert (verdict.outcome, verdict.trust) == (Outcome.UNRESOLVED, "weak")
    await grader.close()


def files_of(reply: str, task: insitu.Task) -> Mapping[str, FileEntry]:
    """The files of the example's function."""
    from insitu.tasks.user_functions import load_function

    build = load_function("examples/generic/generic.py:build_action")
    return {path: FileEntry(content=text.encode()) for path, text in build(reply, task).items()}


def test_the_two_configurations_differ_only_in_the_language() -> None:
    python, julia = (load_config(Path(path), []) for path in (PYTHON, JULIA))
    assert python.model_copy(update={"tasks": julia.tasks}) == julia
    [ours], [theirs] = python.tasks, julia.tasks
    assert ours.model_copy(update={"path": theirs.path}) == theirs
    # The proposal's own limits.
    assert (python.collect.stall_timeout_s, python.collect.max_consecutive_failures) == (60.0, 50)
