"""The reward function: what it gets, what it may return, and what its faults do to a rollout."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, GradeError
from insitu.grading.grader import Grader
from insitu.grading.judge import TaskJudge
from insitu.grading.reward import RewardFunction, main_line, reward_function
from insitu.tasks.base import TaskSource
from insitu.tasks.user_functions import UserFunction
from insitu.types import (
    STEP,
    FileEntry,
    FinishedRollout,
    Ledger,
    Outcome,
    Rollout,
    Status,
    Task,
    Timings,
    Trajectory,
    Turn,
    Verdict,
)

TASK = Task(id="t", prompt="Fix it.", files={"m.py": FileEntry(content=b"x = 1\n")})
SOLVED = Verdict(outcome=Outcome.RESOLVED, reward=1.0, trust="strong")


def turn(index: int, parent: int, excluded: str = "", step: int = 1) -> Turn:
    ids = np.array([index], dtype=np.int32)
    return Turn(
        index=index,
        parent=parent,
        context_ids=ids,
        ids=ids,
        logprobs=None,
        finish="stop",
        version_runs=(),
        excluded=excluded,
        hints=(("label", f"{STEP}{step}"),) if step > 1 else (),
    )


def make(name: str = "train/1/0/0", verdict: Verdict = SOLVED, text: bytes = b"x = 2\n") -> Rollout:
    return Rollout(
        id=name,
        task_id="t",
        category="",
        status=Status.OK,
        reward=verdict.reward,
        trajectory=Trajectory(segments=(), turns=(turn(0, -1),), ledger=Ledger()),
        verdict=verdict,
        changed={"m.py": FileEntry(content=text)},
        deleted=(),
        timings=Timings(),
    )


class _Grader:
    """The part of the grader that scoring uses."""

    class bases:
        @staticmethod
        async def of(task: Task) -> Any:
            return dataclasses.make_dataclass("Base", ["files"])(task.files)

    async def close(self) -> None: ...


class _Source:
    def row(self, task: Task) -> dict[str, Any]:
        return {"rubric": "short"}


def judge(function: Callable[..., Any], *, group: bool = False, timeout_s: float = 20.0) -> TaskJudge:
    user = UserFunction("mine:reward", function, max_concurrent=4, timeout_s=timeout_s)
    reward = RewardFunction(function=user, transcript=lambda rollout: "the text", group=group)
    return TaskJudge(cast(Grader, _Grader()), cast(TaskSource, _Source()), "weak", reward)


@asynccontextmanager
async def _world(row: dict[str, Any]) -> AsyncIterator[str]:
    if row["rubric"] != "short":
        raise OSError("no server")
    yield "a world"


async def test_an_environment_fails_by_its_own_faults_only() -> None:
    scoring = judge(lambda rollout: 1.0)
    async with scoring.environment(TASK) as nothing:
        assert nothing is None
    own = scoring._reward
    assert own is not None
    for opener, row, error in ((_world, "short", AssertionError), (_world, "long", GradeError)):
        scoring._reward = dataclasses.replace(own, opener=opener)
        scoring._source.row = lambda task, row=row: {"rubric": row}  # type: ignore[misc, method-assign]
        with pytest.raises(error):
            async with scoring.environment(TASK) as world:
                assert world == "a world"
                raise AssertionError("a defect of the attempt")
    closed: list[str] = []
    shared = {"gauges": lambda: {"worlds_up": 1}, "close": lambda: closed.append("worlds")}
    scoring._reward = dataclasses.replace(own, **shared)  # type: ignore[arg-type]
    assert scoring.gauges() == {"worlds_up": 1}
    await scoring.close()
    assert closed == ["worlds"]


async def score(function: Callable[..., Any], rollout: Rollout | None = None) -> Rollout:
    scoring = judge(function)
    try:
        return await scoring.score(TASK, rollout or make())
    finally:
        await scoring.close()


async def test_the_function_gets_task_row_files_diff_transcript_turns_and_verdict() -> None:
    seen: list[FinishedRollout] = []
    await score(lambda rollout: seen.append(rollout) or 0.5)
    (one,) = seen
    assert (one.task, one.row, one.verdict, one.status) == (TASK, {"rubric": "short"}, SOLVED, Status.OK)
    assert one.files == {"m.py": FileEntry(content=b"x = 2\n")}
    assert "-x = 1\n+x = 2" in one.diff
    assert (one.transcript, len(one.turns), one.group) == ("the text", 1, ())


async def _later(rollout: FinishedRollout) -> dict[str, float]:
    return {"solved": rollout.verdict.reward or 0.0, "style": -0.25}


@pytest.mark.parametrize(
    ("function", "reward", "parts"),
    [
        (lambda rollout: 0.5, 0.5, {}),
        (lambda rollout: np.float32(-2), -2.0, {}),
        (lambda rollout: None, None, {}),
        (_later, 0.75, {"solved": 1.0, "style": -0.25}),
    ],
)
async def test_a_number_named_numbers_or_none(
    function: Callable[..., Any], reward: float | None, parts: dict[str, float]
) -> None:
    scored = await score(function)
    assert (scored.reward, scored.reward_components) == (reward, parts)
    assert (scored.status, scored.verdict) == (Status.OK, SOLVED)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", {}, {"a": None}, [1.0], 10**400])
async def test_anything_else_is_a_failure_and_not_a_zero(value: object) -> None:
    with pytest.raises(GradeError, match="mine:reward ") as raised:
        await score(lambda rollout: value)
    assert raised.value.infra


async def test_an_exception_is_a_failure_with_its_place() -> None:
    async def broken(rollout: FinishedRollout) -> float:
        raise RuntimeError("the judge is down")

    with pytest.raises(GradeError, match=r"raised RuntimeError\('the judge is down'\) \(test_reward.py line"):
        await score(broken)
    with pytest.raises(TimeoutError):  # the task's later timeouts work
        async with asyncio.timeout(0):
            await asyncio.sleep(1)


@pytest.mark.parametrize("outcome", [Outcome.TAMPERED, Outcome.REFUSED])
async def test_a_tampered_or_refused_rollout_keeps_its_verdict(outcome: Outcome) -> None:
    verdict = Verdict(outcome=outcome, reward=0.0, trust="strong")
    assert (await score(lambda rollout: 1.0, make(verdict=verdict))).reward == 0.0


async def test_a_group_is_scored_when_all_of_it_is_there() -> None:
    """Rank by the length of the change: the shortest of the group gets 1."""
    calls: list[Sequence[str]] = []

    async def rank(rollout: FinishedRollout) -> float:
        calls.append([one.id for one in rollout.group])
        return float(len(rollout.diff) == min(len(one.diff) for one in rollout.group))

    scoring = judge(rank, group=True)
    tampered = Verdict(outcome=Outcome.TAMPERED, reward=0.0, trust="strong")
    group = [make("a", text=b"x = 2\n"), make("b", text=b"x = 2222\n"), make("c", verdict=tampered)]
    alone = [await scoring.score(TASK, one) for one in group]
    assert [one.reward for one in alone] == [None, None, None]
    assert [one.reward for one in await scoring.score_group(TASK, alone)] == [1.0, 0.0, 0.0]
    assert calls == [["a", "b"], ["a", "b"]]
    await scoring.close()


async def test_a_failed_call_for_a_group_is_repeated() -> None:
    calls: list[str] = []

    def flaky(rollout: FinishedRollout) -> float:
        calls.append(rollout.id)
        if rollout.id == "b" and calls.count("b") == 1:
            raise RuntimeError("busy")
        return 1.0

    scoring = judge(flaky, group=True)
    scored = await scoring.score_group(TASK, [make("a"), make("b")])
    assert [(one.reward, one.error) for one in scored] == [(1.0, ""), (1.0, "")]
    assert sorted(calls) == ["a", "b", "b"]
    await scoring.close()


def test_the_main_line_ends_at_the_last_turn_that_counts() -> None:
    turns = (turn(0, -1), turn(1, 0), turn(2, 0), turn(3, -1, "auxiliary"))
    assert [one.index for one in main_line(turns)] == [0, 2]
    assert main_line(()) == []
    assert [one.index for one in main_line(turns[3:])] == [3]


def test_the_main_line_of_several_steps_is_theirs_in_turn() -> None:
    turns = (turn(0, -1), turn(1, 0), turn(2, -1, step=2), turn(3, -1, "auxiliary", 2), turn(4, 2, step=3))
    assert [one.index for one in main_line(turns)] == [0, 1, 2, 4]


def test_the_configured_function_is_found_by_name_path_or_object() -> None:
    def read(value: object) -> RewardFunction | None:
        config = load_config(None, {"reward.function": value, "reward.max_concurrent": 2})
        return reward_function(config, lambda rollout: "")

    found = read(lambda rollout: 1.0)
    assert found is not None
    assert found.function.name.startswith("reward.function object:")
    with pytest.raises(ConfigError, match="json:__name__ is not a function"):
        read("json:__name__")
    with pytest.raises(ConfigError, match="unknown name 'judge' of kind rewards"):
        read("judge")
    assert reward_function(load_config(None), lambda rollout: "") is None
    with pytest.raises(ConfigError, match="max_concurrent has no effect with function"):
        load_config(None, ["reward.max_concurrent=2"])
    with pytest.raises(ConfigError, match="in tasks: reward must be a table"):
        load_config(None, ["tasks.reward=mine:judge"])
