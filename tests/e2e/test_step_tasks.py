"""Tasks of several steps: one sandbox, one session and one reward, each step graded before the next."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.judge import TaskJudge
from insitu.grading.reward import main_line
from insitu.runtime.agents import limits_of
from insitu.runtime.run import open_runtime
from insitu.runtime.sandboxes import check_tasks
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowSource
from insitu.tasks.factory import format_of
from insitu.types import Message, Outcome, Rollout, Status, Task, Tree, Verdict, task_hash
from insitu_tasksets.validate import check_item
from insitu_train.demo.demonstrator import call
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine

EXAMPLE = Path(__file__).parents[2] / "examples/steps"
TOTAL = "awk -F, '{ sum += $2 } END { print sum }' stock.csv > total.txt"
NAMES = "cut -d, -f1 stock.csv | sort > names.txt"
DONE = Message(role="assistant", text="done")


def rehashed(task: Task, **changes: Any) -> Task:
    task = replace(task, **changes)
    named = task_hash(task.prompt, task.files, task.grading, task.setup, task.steps)
    return replace(task, content_hash=named)


def in_image(item: Item, image: str = "") -> Item:
    """The same task in another image, by default in none: local sandboxes have none."""
    setup = replace(item.task.setup, image=image)
    steps = tuple(replace(step, task=rehashed(step.task, setup=setup)) for step in item.task.steps)
    return Item(task=rehashed(item.task, setup=setup, steps=steps), oracle=item.oracle)


def example(folder: Path, **files: str) -> Item:
    """The example with other files, without its image."""
    shutil.copytree(EXAMPLE, folder / "tasks")
    for name, text in files.items():
        path = folder / "tasks/stock" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    options = LoadOptions(limits=limits_of(configured("script")))
    (item,) = RowSource("harbor", format_of("harbor"), folder / "tasks", options).every()
    return in_image(item)


class OneTask:
    """A task source of one task."""

    endless = False

    def __init__(self, item: Item) -> None:
        self.item = item

    def tasks(self, split: str, first: int, count: int) -> list[Task]:
        return [self.item.task]

    def oracle(self, task: Task) -> object:
        return self.item.oracle

    def row(self, task: Task) -> Mapping[str, Any]:
        return {}


def configured(agent: str, *more: str) -> Config:
    settings = (
        f"harness.agent={agent}", "harness.workers=1", "limits.wall_s=60", "limits.max_call_tokens=2048",
        "model.max_context_tokens=65536", *more,
    )  # fmt: skip
    return load_config(None, list(settings))


async def attempt(
    folder: Path, item: Item, commands: list[str | None], agent: str = "script", *more: str
) -> Rollout:
    """Run a rollout whose model runs each command in turn; None = it says that it is done."""
    config = configured(agent, *more)
    write_renderer(folder / "family", "")
    renderer = template_renderer(read_folder(folder / "family"))
    script = [DONE if command is None else call("bash", command=command) for command in commands]
    engine = ScriptedEngine(renderer, lambda ids, key: script[min(key.turn, len(script) - 1)], sampled=True)
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=item.task, seed=1)
    source: Any = OneTask(item)
    async with open_runtime(config, TokenBackend(engine, renderer), source) as runtime:
        return await AttemptExecutor(runtime.gateway, runtime.workers, runtime.judge).run(spec)


@pytest.mark.slow
async def test_each_step_is_graded_and_all_are_one_rollout(tmp_path: Path) -> None:
    item = example(tmp_path)
    assert [step.name for step in item.task.steps] == ["total", "delivery"]
    rollout = await attempt(
        tmp_path, item, [f"echo kept > ~/notes; {TOTAL}", None, "cat ~/notes > names.txt", TOTAL, None]
    )
    verdict = rollout.verdict
    assert verdict is not None, rollout.error
    assert (rollout.status, rollout.reward) == (Status.OK, 0.75), verdict
    assert rollout.reward_components == {"total": 1.0, "delivery": 0.5}
    assert (verdict.outcome, verdict.passed, verdict.total) == (Outcome.UNRESOLVED, 1, 2)
    assert verdict.reason.startswith("total 1, delivery 0.5; delivery: the tests gave 0.5")
    assert verdict.task_hash == item.task.content_hash
    assert rollout.changed["names.txt"].content == b"kept\n", (
        "the home of the first step is that of the second"
    )
    assert "anchors,2" in rollout.changed["stock.csv"].content.decode()
    assert {*rollout.changed} == {"names.txt", "stock.csv", "total.txt"}, "setup.sh is the task's"
    assert len(rollout.turns) == 5
    assert [turn.excluded for turn in rollout.turns] == [""] * 5
    ledger = rollout.trajectory.ledger
    assert ledger.balanced
    assert ledger.trained == ledger.captured > 0
    labels = [segment.label for segment in rollout.trajectory.segments]
    assert labels == ["final", "final"], "each step has a conversation of its own"
    assert [turn.step for turn in rollout.turns] == [1, 1, 2, 2, 2]
    assert [turn.index for turn in main_line(rollout.turns)] == [0, 1, 2, 3, 4]
    assert rollout.timings.grade_s > 0


@pytest.mark.slow
async def test_a_step_below_its_least_reward_ends_the_rollout(tmp_path: Path) -> None:
    rollout = await attempt(tmp_path, example(tmp_path), ["echo 48 > total.txt", None])
    verdict = rollout.verdict
    assert verdict is not None, rollout.error
    assert (rollout.status, rollout.reward, rollout.reward_components) == (
        Status.OK, 0.0, {"total": 0.0, "delivery": 0.0},
    )  # fmt: skip
    why = "total 0, delivery 0; total is below its min_reward 1; total: the tests gave 0"
    assert verdict.reason.startswith(why)
    assert len(rollout.turns) == 2
    assert ({*rollout.changed}, rollout.deleted) == ({"total.txt"}, ()), "the second step was not begun"


@pytest.mark.slow
async def test_an_agent_gains_nothing_by_breaking_the_next_step(tmp_path: Path) -> None:
    first = f"{TOTAL}; rm stock.csv; mkdir stock.csv"
    rollout = await attempt(tmp_path, example(tmp_path), [first, None, NAMES, None])
    verdict = rollout.verdict
    assert verdict is not None, rollout.error
    assert (rollout.reward, rollout.reward_components) == (0.5, {"total": 1.0, "delivery": 0.0}), verdict
    assert verdict.reason == "total 1, delivery 0; delivery could not start"
    assert rollout.status is Status.AGENT_FAILED
    assert rollout.error.startswith(
        "the command of step delivery ended with 1: setup.sh: line 2: stock.csv: "
    )


@pytest.mark.slow
async def test_what_earlier_steps_laid_is_no_change_of_the_agents(tmp_path: Path) -> None:
    """More files than a change may add, one that is protected, and one that is no text."""
    needed = "test -f pyproject.toml && test -f data.bin && test -f src/f219.py"
    test = (EXAMPLE / "stock/steps/delivery/tests/test.sh").read_text()
    laid = {f"src/f{number}.py": "x = 1\n" for number in range(220)}
    laid |= {"pyproject.toml": "[project]\nname = 'x'\n", "data.bin": "\0\1\2\3"}
    item = example(
        tmp_path,
        **{f"steps/total/workdir/{path}": text for path, text in laid.items()},
        **{"steps/delivery/tests/test.sh": f"{test}\n{needed} || echo 0 > /logs/verifier/reward.txt\n"},
    )
    rollout = await attempt(tmp_path, item, [TOTAL, None, f"{TOTAL}; {NAMES}", None])
    assert rollout.verdict is not None, rollout.error
    assert (rollout.reward, rollout.verdict.outcome) == (1.0, Outcome.RESOLVED), rollout.verdict
    assert {*rollout.changed} == {"names.txt", "stock.csv", "total.txt"}


@pytest.mark.full
async def test_a_busy_grader_takes_no_time_from_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TaskJudge.step

    async def late(self: TaskJudge, task: Task, number: int, tree: Tree) -> Verdict:
        await asyncio.sleep(0.0 if number else 12.0)
        return await plain(self, task, number, tree)

    monkeypatch.setattr(TaskJudge, "step", late)
    toml = (EXAMPLE / "stock/task.toml").read_text().replace("timeout_sec = 120.0", "timeout_sec = 3.0")
    item = example(tmp_path, **{"task.toml": toml.replace("timeout_sec = 20.0", "timeout_sec = 1.0")})
    rollout = await attempt(tmp_path, item, [TOTAL, None, f"{TOTAL}; {NAMES}", None])
    assert rollout.verdict is not None, rollout.error
    assert (rollout.status, rollout.reward) == (Status.OK, 1.0), rollout.verdict


@pytest.mark.slow
async def test_the_last_reward_may_be_that_of_the_task(tmp_path: Path) -> None:
    text = (EXAMPLE / "stock/task.toml").read_text()
    final = text.replace('strategy = "mean"', 'strategy = "final"').replace(
        "min_reward = 1.0", "min_reward = 0.0"
    )
    rollout = await attempt(
        tmp_path, example(tmp_path, **{"task.toml": final}), ["true", None, f"{TOTAL}; {NAMES}", None]
    )
    assert rollout.verdict is not None, rollout.error
    assert (rollout.reward, rollout.verdict.outcome) == (1.0, Outcome.RESOLVED)
    assert rollout.reward_components == {"total": 0.0, "delivery": 1.0}


@pytest.mark.slow
async def test_what_a_step_left_running_is_there_in_the_next(tmp_path: Path) -> None:
    wait = "for n in $(seq 100); do sleep 0.1; test -f setup.sh && { echo seen > names.txt; exit; }; done"
    left = f"({wait}) >/dev/null 2>&1 &"
    rollout = await attempt(
        tmp_path, example(tmp_path), [f"{TOTAL}; {left}", None, f"{TOTAL}; sleep 0.5", None]
    )
    assert rollout.changed["names.txt"].content == b"seen\n"


@pytest.mark.slow
async def test_each_step_is_validated_with_its_solution(tmp_path: Path) -> None:
    backend = LocalBackend()
    grader = Grader(backend, GradeConfig(timeout_s=20.0))
    item = example(tmp_path)
    found = await check_item(grader, backend, item, 2)
    assert (found.status, found.reason) == ("passed", "")
    test = (EXAMPLE / "stock/steps/delivery/tests/test.sh").read_text()
    wrong = example(
        tmp_path / "wrong",
        **{
            "steps/delivery/solution/solve.sh": "echo 91 > total.txt\n",
            "steps/delivery/tests/test.sh": f"{test}\necho no names\n",
        },
    )
    found = await check_item(grader, backend, wrong, 1)
    assert (found.status, found.reason) == (
        "failed",
        "step delivery: the gold fails (unresolved): the tests gave 0.5; the output ends: no names",
    )
    cut = example(tmp_path / "cut", **{"steps/delivery/workdir/setup.sh": "echo no disk >&2; exit 3\n"})
    found = await check_item(grader, backend, cut, 1)
    assert (found.status, found.reason) == ("failed", "the command of step delivery ended with 3: no disk")
    idle = example(tmp_path / "idle", **{"steps/total/tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"})
    found = await check_item(grader, backend, idle, 1)
    assert (found.status, found.reason) == ("failed", "step total: it passes before its solution")
    verdict = await grader.grade(item.task, item.oracle, {})
    assert (verdict.outcome, verdict.reason) == (
        Outcome.INFRA, "it is graded after each step, whose files are gone",
    )  # fmt: skip


async def test_who_is_asked_once_gets_no_such_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task stock has several steps, and single_turn is asked once"):
        check_tasks(configured("single_turn"), [example(tmp_path).task])


async def test_rows_of_the_last_step_alone_are_not_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task stock has several steps, and train.rows = final trains"):
        check_tasks(configured("script", "train.rows=final"), [example(tmp_path).task])


ALL = [f"echo kept > ~/notes; {TOTAL}", None, f"cat ~/notes; {TOTAL}; {NAMES}", None]


@pytest.mark.full
@pytest.mark.parametrize(
    ("agent", "last"), [("pi", None), ("mini_swe", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
)
async def test_a_real_agent_is_asked_for_each_step(tmp_path: Path, agent: str, last: str | None) -> None:
    commands = [command or last for command in ALL]
    rollout = await attempt(tmp_path, example(tmp_path), commands, agent)
    assert rollout.verdict is not None, rollout.error
    assert (rollout.status, rollout.reward, rollout.verdict.outcome) == (Status.OK, 1.0, Outcome.RESOLVED)
    assert rollout.reward_components == {"total": 1.0, "delivery": 1.0}
    ledger = rollout.trajectory.ledger
    assert ledger.balanced
    assert ledger.trained == ledger.captured > 0


@pytest.mark.full
async def test_a_step_task_is_run_and_graded_in_an_image(docker_image: str, tmp_path: Path) -> None:
    item = in_image(example(tmp_path), docker_image)
    rollout = await attempt(tmp_path, item, ALL, "script", "sandbox.backend=docker")
    assert rollout.verdict is not None, rollout.error
    assert (rollout.status, rollout.reward) == (Status.OK, 1.0)
    assert rollout.verdict.image.startswith(docker_image)
    assert rollout.reward_components == {"total": 1.0, "delivery": 1.0}
