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

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, FunctionFailed, GradeError, TaskError
from insitu.grading.runners.find import runner_for
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import action_of, format_of, open_rows
from insitu.tasks.user_functions import FAILURES, UserFunction, load_function
from insitu.types import Limits


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


@pytest.fixture
def module() -> Iterator[str]:
    made = ModuleType("user_functions_of_a_test")
    vars(made).update(double=double, number=3)
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


async def call(function: Callable[..., Any] | UserFunction, answer: str = "") -> Any:
    user = function if isinstance(function, UserFunction) else UserFunction("mine:reward", function)
    return await user.call(lambda reward: reward(answer))


def _reads(answer: str) -> Any:
    return json.loads(answer)


async def test_a_reward_function_that_fails_again_and_again_ends_the_run() -> None:
    user = UserFunction("mine:reward", _reads)
    for _ in range(FAILURES - 1):
        with pytest.raises(GradeError):
            await call(user, "x")
    await call(user, "0.5")  # a success begins the count again
    for _ in range(FAILURES - 1):
        with pytest.raises(GradeError):
            await call(user, "x")
    with pytest.raises(TaskError, match=f"failed {FAILURES} times in a row; the last time it raised J"):
        await call(user, "x")


async def test_a_slow_reward_does_not_stop_the_event_loop() -> None:
    release = threading.Event()

    def waits(*_: object) -> float:
        return float(release.wait(20.0))

    scoring = asyncio.ensure_future(call(waits))
    await asyncio.sleep(0.05)
    assert not scoring.done()
    release.set()
    assert await scoring == 1.0


async def test_a_reward_that_hangs_is_given_up_and_does_not_keep_the_process() -> None:
    release = threading.Event()
    user = UserFunction("mine:reward", lambda *_: release.wait(60.0), timeout_s=0.1)
    with pytest.raises(GradeError, match="mine:reward did not return within 0.1 s"):
        await call(user)
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

    user = UserFunction("mine:reward", hangs, max_concurrent=2, timeout_s=0.1)
    late = "did not return within 0.1 s"
    no_place = "got no free slot for 0.1 s: 2 earlier calls hang"
    ended = await asyncio.gather(*(call(user) for _ in range(4)), return_exceptions=True)
    assert [str(error) for error in ended] == [f"mine:reward {said}" for said in 2 * [late] + 2 * [no_place]]
    assert most == [2]
    with pytest.raises(FunctionFailed, match=f"5 times in a row; the last time it {no_place}"):
        await call(user)
    release.set()
    assert await call(user) == 0.5


async def test_a_caller_that_is_cancelled_does_not_free_the_place_of_its_thread() -> None:
    release = threading.Event()
    user = UserFunction("mine:reward", lambda *_: float(release.wait(60.0)), timeout_s=60.0)
    first, second = asyncio.ensure_future(call(user)), asyncio.ensure_future(call(user))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.05)
    threads = [thread for thread in threading.enumerate() if thread.name == "insitu-user-function"]
    assert len(threads) == 1
    release.set()
    assert await second == 1.0


async def test_a_queue_that_moves_is_waited_for() -> None:
    """Longer than the limit of one call: slow is not hanging."""
    user = UserFunction("mine:reward", lambda *_: time.sleep(0.1) or 0.5, timeout_s=0.25)
    ended = await asyncio.gather(*(call(user) for _ in range(6)))
    assert ended == 6 * [0.5]


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration()])
async def test_what_a_thread_cannot_raise_is_a_failure_too(error: BaseException) -> None:
    def leaves(*_: object) -> float:
        raise error

    with pytest.raises(GradeError, match=type(error).__name__):
        await call(leaves)


def test_a_transform_that_raises_is_one_line_with_the_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("t0")])

    def broken(value: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("question")

    with pytest.raises(TaskError, match=r"a.jsonl:1: transform raised KeyError\('question'\)"):
        RowSource("mine", format_of("jsonl"), path, transform=broken)


def test_only_what_can_be_called_is_a_function() -> None:
    assert load_function("json:dumps") is json.dumps
    with pytest.raises(ConfigError, match="json:__name__ is a str, not a function"):
        load_function("json:__name__")


async def test_coroutine_functions_share_a_loop_of_their_own_and_may_block_it() -> None:
    loops, release = set[asyncio.AbstractEventLoop](), threading.Event()

    async def judge(answer: str) -> str:
        loops.add(asyncio.get_running_loop())
        if answer == "block":
            release.wait(20.0)
        await asyncio.sleep(0)
        return answer

    user = UserFunction("mine:reward", judge, max_concurrent=3)
    blocked = asyncio.ensure_future(call(user, "block"))
    await asyncio.sleep(0.05)  # this loop is not blocked
    assert not blocked.done()
    release.set()
    assert await blocked == "block"
    assert await asyncio.gather(call(user, "a"), call(user, "b")) == ["a", "b"]
    assert len(loops) == 1
    assert loops != {asyncio.get_running_loop()}
    user.close()


async def test_a_coroutine_that_is_late_is_cancelled_and_gives_its_slot_back() -> None:
    cancelled = threading.Event()

    async def judge(answer: str) -> str:
        try:
            await asyncio.sleep(60.0 if answer == "late" else 0.0)
        finally:
            if answer == "late":
                cancelled.set()
        return answer

    user = UserFunction("mine:reward", judge, timeout_s=0.1)
    with pytest.raises(GradeError, match="did not return within 0.1 s"):
        await call(user, "late")
    assert await asyncio.to_thread(cancelled.wait, 20.0)
    assert await call(user, "now") == "now"
    user.close()


async def test_close_cancels_running_coroutines_and_ends_their_thread() -> None:
    started = threading.Event()

    async def judge(answer: str) -> None:
        started.set()
        await asyncio.sleep(60.0)

    user = UserFunction("mine:reward", judge)
    running = asyncio.ensure_future(call(user))
    assert await asyncio.to_thread(started.wait, 20.0)
    (loop,) = [thread for thread in threading.enumerate() if thread.name == "insitu-user-loop"]
    user.close()
    with pytest.raises(GradeError, match="was cancelled"):
        await running
    await asyncio.to_thread(loop.join, 20.0)
    assert not loop.is_alive()


def test_a_build_action_is_found() -> None:
    found = action_of(load_config(None, ["tasks.parse_answer=json:dumps", "harness.agent=single_turn"]))
    assert found is not None
    assert found.name == "tasks.parse_answer json:dumps"
    assert action_of(load_config(None)) is None
