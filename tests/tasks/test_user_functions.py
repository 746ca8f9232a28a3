"""The user's own functions: where they are found, what they may return, and what a bug in one does."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, GradeError, TaskError
from insitu.grading.grader import runner_for
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import FORMATS, action_of, open_rows, open_source
from insitu.tasks.user_functions import FAILURES, FunctionFailed, UserFunction, load_function, reward_of
from insitu.types import FileEntry, Limits, Outcome, Task, Verdict


def row(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": f"Fix {name}.",
        "files": {"m.py": "def f(x):\n    return x\n"},
        "entry": "m.py",
        "cases": [{"function": "f", "args": [1], "expected": 2}],
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def double(value: Mapping[str, Any]) -> dict[str, Any] | None:
    return None if value["id"] == "t1" else {**value, "prompt": value["prompt"] * 2}


def half(value: Mapping[str, Any], answer: Mapping[str, str], verdict: Verdict) -> float:
    return 0.5 if value["id"] == "t0" and "m.py" in answer and verdict.reward == 1.0 else 0.0


def wrong(*_: object) -> object:
    return float("nan")


@pytest.fixture
def module() -> Iterator[str]:
    made = ModuleType("user_functions_of_a_test")
    vars(made).update(double=double, half=half, wrong=wrong, number=3)
    sys.modules[made.__name__] = made
    yield made.__name__
    del sys.modules[made.__name__]


def test_rows_are_transformed_and_left_out(tmp_path: Path, module: str) -> None:
    path = write(tmp_path / "a.jsonl", [row("t0"), row("t1")])
    config = load_config(
        None, ["tasks.source=jsonl", f"tasks.path={path}", f"tasks.transform={module}:double"]
    )
    source = open_rows(config, Limits(), runner_for)
    assert [item.task.prompt for item in source.every()] == ["Fix t0.Fix t0."]
    assert source.left_out == 1


async def test_the_users_reward_replaces_that_of_a_graded_verdict_only(tmp_path: Path, module: str) -> None:
    path = write(tmp_path / "a.jsonl", [row("t0")])
    base = ["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=1"]
    source = open_source(load_config(None, [*base, f"tasks.reward={module}.half"]), Limits(), runner_for)
    task = source.tasks("eval", 0, 1)[0]
    after = {**task.files, "m.py": FileEntry(content=b"other")}
    solved = Verdict(outcome=Outcome.RESOLVED, reward=1.0, trust="strong")
    assert (await source.scored(task, after, solved)).reward == 0.5
    assert (await source.scored(task, task.files, solved)).reward == 0.0
    for outcome, reward in ((Outcome.TAMPERED, 0.0), (Outcome.INFRA, None)):
        verdict = Verdict(outcome=outcome, reward=reward, trust="strong")
        assert await source.scored(task, after, verdict) == verdict
    source = open_source(load_config(None, [*base, f"tasks.reward={module}:wrong"]), Limits(), runner_for)
    with pytest.raises(GradeError, match=rf"^tasks.reward {module}:wrong returned nan"):
        await source.scored(task, after, solved)


SOLVED = Verdict(outcome=Outcome.RESOLVED, reward=1.0, trust="strong", reason="all pass")
PLAIN_TASK = Task(id="t0", prompt="", files={})


async def reward(function: Callable[..., Any] | UserFunction, answer: str = "") -> Verdict:
    user = function if isinstance(function, UserFunction) else UserFunction("mine:reward", function)
    return await reward_of(user, {}, PLAIN_TASK, {"m.py": FileEntry(content=answer.encode())}, SOLVED)


def _reads(row: dict[str, Any], answer: dict[str, str], verdict: Verdict) -> Any:
    return json.loads(answer["m.py"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "not json",
            "raised JSONDecodeError('Expecting value: line 1 column 1 (char 0)')"
            " (test_user_functions.py line ",
        ),
        ("NaN", "returned nan, not a number from 0 to 1"),
        ("1.01", "returned 1.01, not"),
        ("-1", "returned -1, not"),
        ("true", "returned True, not"),
        ('"\\ud800"', "returned '\\ud800', not"),
        ("null", "returned None, not"),
        ("1" + "0" * 400, "raised OverflowError"),
    ],
)
async def test_a_reward_function_that_breaks_has_failed_and_scores_nothing(answer: str, said: str) -> None:
    with pytest.raises(GradeError) as raised:
        await reward(_reads, answer)
    assert str(raised.value).startswith(f"mine:reward {said}")
    assert raised.value.infra


async def test_numbers_of_numpy_are_numbers() -> None:
    assert (await reward(lambda *_: np.float32(0.5))).reward == 0.5
    assert (await reward(lambda *_: np.int64(1))).reward == 1.0


async def test_a_reward_function_that_fails_again_and_again_ends_the_run() -> None:
    user = UserFunction("mine:reward", _reads)
    for _ in range(FAILURES - 1):
        with pytest.raises(GradeError):
            await reward(user, "x")
    await reward(user, "0.5")  # a success begins the count again
    for _ in range(FAILURES - 1):
        with pytest.raises(GradeError):
            await reward(user, "x")
    with pytest.raises(TaskError, match=f"failed {FAILURES} times in a row; the last time it raised J"):
        await reward(user, "x")


async def test_a_slow_reward_does_not_stop_the_event_loop() -> None:
    release = threading.Event()

    def waits(*_: object) -> float:
        return float(release.wait(20.0))

    scoring = asyncio.ensure_future(reward(waits))
    await asyncio.sleep(0.05)
    assert not scoring.done()
    release.set()
    assert (await scoring).reward == 1.0


async def test_a_reward_that_hangs_is_given_up_and_does_not_keep_the_process() -> None:
    release = threading.Event()
    user = UserFunction("mine:reward", lambda *_: release.wait(60.0), timeout_s=0.1)
    with pytest.raises(GradeError, match="mine:reward did not return within 0.1 s"):
        await reward(user)
    left = [thread for thread in threading.enumerate() if thread.name == "insitu-user-function"]
    assert left
    assert all(thread.daemon for thread in left)
    release.set()


async def test_a_call_that_hangs_keeps_its_place_until_it_returns() -> None:
    release, running, most = threading.Event(), [0], [0]
    lock = threading.Lock()

    def hangs(*_: object) -> float:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        release.wait(60.0)
        with lock:
            running[0] -= 1
        return 0.5

    user = UserFunction("mine:reward", hangs, at_once=2, timeout_s=0.1)
    late = "did not return within 0.1 s"
    no_place = "left no place free for 0.1 s: 2 earlier calls hang"
    ended = await asyncio.gather(*(reward(user) for _ in range(4)), return_exceptions=True)
    assert [str(error) for error in ended] == [f"mine:reward {said}" for said in 2 * [late] + 2 * [no_place]]
    assert most == [2]
    with pytest.raises(FunctionFailed, match=f"5 times in a row; the last time it {no_place}"):
        await reward(user)
    release.set()
    assert (await reward(user)).reward == 0.5


async def test_a_caller_that_is_cancelled_does_not_free_the_place_of_its_thread() -> None:
    release = threading.Event()
    user = UserFunction("mine:reward", lambda *_: float(release.wait(60.0)), timeout_s=60.0)
    first, second = asyncio.ensure_future(reward(user)), asyncio.ensure_future(reward(user))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.05)
    threads = [thread for thread in threading.enumerate() if thread.name == "insitu-user-function"]
    assert len(threads) == 1
    release.set()
    assert (await second).reward == 1.0


async def test_a_queue_that_moves_is_waited_for() -> None:
    """Longer than the limit of one call: slow is not hanging."""
    user = UserFunction("mine:reward", lambda *_: time.sleep(0.1) or 0.5, timeout_s=0.25)
    ended = await asyncio.gather(*(reward(user) for _ in range(6)))
    assert [verdict.reward for verdict in ended] == 6 * [0.5]


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration()])
async def test_what_a_thread_cannot_raise_is_a_failure_too(error: BaseException) -> None:
    def leaves(*_: object) -> float:
        raise error

    with pytest.raises(GradeError, match=type(error).__name__):
        await reward(leaves)


def test_a_transform_that_raises_is_one_line_with_the_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("t0")])

    def broken(value: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("question")

    with pytest.raises(TaskError, match=r"a.jsonl:1: row .*transform raised KeyError\('question'\)"):
        RowSource("mine", FORMATS["jsonl"], path, transform=broken)


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("nowhere_at_all:f", r"cannot import nowhere_at_all .*\(looked in .*\)"),
        ("json:nothing", r"json \(.*\) has no function nothing"),
        ("json:__name__", r"json \(.*\) has no function __name__"),
        ("json", "is no dotted path"),
        (":f", "is no dotted path"),
    ],
)
def test_functions_that_are_not_there(dotted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(dotted)


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_here.py").write_text(
        "def score(*_):\n    return 1.0\n\nasync def later(*_):\n    return 1.0\n"
    )
    (tmp_path / "my_broken_rewards.py").write_text("import json\nlimit = undefined\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert load_function("my_rewards_here:score")() == 1.0
    with pytest.raises(ConfigError, match="is an async function"):
        load_function("my_rewards_here:later")
    with pytest.raises(ConfigError, match="cannot import my_broken_rewards .*NameError.*undefined"):
        load_function("my_broken_rewards:score")
    for name in ("my_rewards_here", "my_broken_rewards"):
        sys.modules.pop(name, None)


def test_a_build_action_is_found() -> None:
    found = action_of(load_config(None, ["tasks.parse_answer=json:dumps"]))
    assert found is not None
    assert found.name == "tasks.parse_answer json:dumps"
    assert action_of(load_config(None)) is None
