"""Runner `stdio`: programs in local sandboxes, what counts as the same output, and what a cheat sees."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace

import pytest

from insitu.errors import TaskError
from insitu.grading.grader import GradeConfig, Grader, runner_for
from insitu.grading.runners.stdio import same_output
from insitu.sandbox.local import LocalBackend
from insitu.tasks.user_functions import FAILURES, FunctionFailed
from insitu.types import (
    Exchange,
    FileEntry,
    GradingPlan,
    Oracle,
    Outcome,
    RewardKind,
    Task,
    Verdict,
    task_hash,
)

FILES = {"solution.py": FileEntry(content=b"\n")}
GOOD = "a, b = map(int, input().split())\nprint(a + b)\n"
EXCHANGES = (
    Exchange(stdin="1 2\n", expected="3\n"),
    Exchange(stdin="10 20\n", expected="30"),
    Exchange(stdin="7 5\n", expected="12 \n\n"),
)


def make(reward: RewardKind = "binary", *, timeout_s: float = 5.0, checker: str = "") -> tuple[Task, Oracle]:
    plan = GradingPlan(runner="stdio", entry="solution.py", timeout_s=timeout_s, reward=reward)
    task = Task(id="t", prompt="p", files=FILES, grading=plan, content_hash=task_hash("p", FILES, plan))
    gold = {"solution.py": FileEntry(content=GOOD.encode())}
    return task, Oracle(task_id="t", exchanges=EXCHANGES, checker=checker, gold=gold)


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader(LocalBackend(), GradeConfig(remember=0))


async def judge(grader: Grader, made: tuple[Task, Oracle], program: str) -> Verdict:
    return await grader.grade(*made, {"solution.py": FileEntry(content=program.encode())})


@pytest.mark.slow
async def test_a_program_is_judged_by_what_it_prints(grader: Grader) -> None:
    await grader.validate(*make(), repeats=1)
    solved = await judge(grader, make(), GOOD)
    assert (solved.outcome, solved.reward, solved.trust) == (Outcome.RESOLVED, 1.0, "strong"), solved
    assert (solved.passed, solved.total) == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("a, b = map(int, input().split())\nprint(a + b if a < 10 else 0)\n", "input 1: a wrong output"),
        (GOOD + "raise SystemExit(3)\n", "input 0: exit code 3"),
        (GOOD + "print('more')\n", "input 0: a wrong output"),
        ("print(3)\n", "input 1: a wrong output"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff')\n", "input 0: the output is not UTF-8"),
        ("print('3' * (4 << 20))\n", "input 0: too much output"),
        ("x = [0] * (1 << 30)\n" + GOOD, "input 0: exit code 1"),
        ("import os\nos.kill(os.getppid(), 9)\n", "input 0: "),
        ("import os\nos.kill(-1, 9)\n", "input 0: "),
    ],
    ids=["wrong", "exit", "more", "constant", "bytes", "flood", "memory", "parent", "all"],
)
async def test_a_wrong_program_earns_nothing(grader: Grader, program: str, reason: str) -> None:
    verdict = await judge(grader, make(), program)
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict
    assert reason in verdict.reason


@pytest.mark.slow
async def test_a_failing_input_is_kept_as_evidence(grader: Grader) -> None:
    verdict = await judge(grader, make("fraction"), "print('\x1b[31m3')\n" * 2)
    assert verdict.evidence is not None
    first = verdict.evidence[0]
    assert (first.name, first.outcome, first.expected) == ("input 0", "a wrong output", "3\n")
    assert first.got == "\ufffd[31m3\n\ufffd[31m3\n"
    assert [check.name for check in verdict.evidence] == ["input 0", "input 1", "input 2"]
    assert "evidence" not in repr(verdict)
    assert (await judge(grader, make(), GOOD)).evidence == ()


@pytest.mark.slow
async def test_time_is_the_candidates(grader: Grader) -> None:
    verdict = await judge(grader, make(timeout_s=1.0), "while True: pass\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0)
    assert re.search(r"input 0: out of (CPU )?time", verdict.reason)


THREADS = """
import hashlib, threading
def hash_always():
    while True:
        hashlib.sha256(bytes(1 << 26))
for _ in range(4):
    threading.Thread(target=hash_always).start()
"""
"""Use more CPU time than time passes, on more than one core."""


@pytest.mark.slow
async def test_threads_that_use_up_the_time_are_the_candidates(grader: Grader) -> None:
    verdict = await judge(grader, make(timeout_s=1.0), THREADS)
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0), verdict


@pytest.mark.full
@pytest.mark.slow
async def test_all_inputs_together_may_wait_as_long_as_one(
    grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grading.grader.stalled_s", lambda: 0.0)
    verdict = await judge(grader, make(timeout_s=1.0), "import time\ntime.sleep(2)\n" + GOOD)
    assert (verdict.outcome, verdict.reward, verdict.passed) == (Outcome.TEST_TIMEOUT, 0.0, 1), verdict


@pytest.mark.slow
async def test_a_fraction_counts_every_input(grader: Grader) -> None:
    half = "a, b = map(int, input().split())\nprint(a + b if a != 10 else 0)\n"
    verdict = await judge(grader, make("fraction"), half)
    assert (verdict.outcome, verdict.passed, verdict.reward) == (Outcome.UNRESOLVED, 2, 2 / 3)


@pytest.mark.slow
async def test_nothing_of_an_expected_output_is_in_the_sandbox(grader: Grader) -> None:
    """The cheat prints whatever may be an answer of the processes and files that it can read."""
    cheat = """
import os, re
seen = [open(f"/proc/{p}/{n}", "rb").read() for p in os.listdir("/proc") if p.isdigit()
        for n in ("cmdline", "environ") if os.access(f"/proc/{p}/{n}", os.R_OK)]
for top in ("/work", "/tmp", "/dev/shm"):
    for root, _, names in os.walk(top):
        seen += [open(os.path.join(root, name), "rb").read() for name in names]
print(*set(re.findall("answer-[0-9]+", b" ".join(seen).decode("utf-8", "replace"))))
"""
    task, _ = make("fraction")
    oracle = Oracle(
        task_id="t", exchanges=tuple(Exchange(stdin=f"{n}\n", expected=f"answer-{n}") for n in (7, 8))
    )
    verdict = await judge(grader, (task, oracle), cheat)
    assert (verdict.outcome, verdict.passed) == (Outcome.UNRESOLVED, 0), verdict
    assert "a wrong output" in verdict.reason


@pytest.mark.slow
async def test_a_process_that_stays_answers_no_later_input(grader: Grader) -> None:
    """It holds the output of the first input open, and is gone before the second."""
    stays = """
import os, sys, time
if os.path.exists("/tmp/first"):
    print("alive" if os.path.exists(f"/proc/{open('/tmp/first').read()}") else "gone")
else:
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(600)
    open("/tmp/first", "w").write(str(child))
    print("first")
"""
    task, _ = make()
    oracle = Oracle(
        task_id="t",
        exchanges=(Exchange(stdin="", expected="first"), Exchange(stdin="", expected="gone")),
    )
    verdict = await judge(grader, (task, oracle), stays)
    assert verdict.outcome is Outcome.RESOLVED, verdict


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2\n3\n", "1  2 3\n\n", True),
        ("1 2", "12", False),
        ("1 2", "1 2 3", False),
        ("0.5", "0.50", True),
        ("0.5", "0.5000001", True),
        ("0.5", "0.501", False),
        ("1000000.0", "1000000.5", True),
        ("1", "1.0", True),
        ("1", "1e0", True),
        ("1", "1.0000001", False),
        ("10000000000000000000001", "10000000000000000000000", False),
        ("1.0", "1", True),
        ("1.0", "nan", False),
        ("1.0", "1e" + "9" * 100, False),
        ("0.5", "1e1000000", False),
        ("0.5", "-1e1000005", False),
        ("Yes", "YES", False),
        ("12", "\u0661\u0662", False),
        ("12.0", "\uff11\uff12", False),
        ("1000", "1_000", False),
        ("1e999999", "1e999998", False),
        ("", "", True),
    ],
)
def test_what_counts_as_the_same_output(expected: str, printed: str, same: bool) -> None:
    assert same_output(expected, printed) is same


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n3\n", " 1  2 \n 3", True),
        ("1 2\n3\n", "1\n2 3\n", False),
        ("1 2\n3\n", "1 2 3", False),
        ("0.5", "0.50", True),
        ("0.5", "0.5000001", False),
        ("1", "1.0", True),
        ("50000000000000000", "50000000000000001", False),
    ],
)
def test_what_counts_as_the_same_lines(expected: str, printed: str, same: bool) -> None:
    assert same_output(expected, printed, by_line=True, tolerance=0.0) is same


def any_order(stdin: str, expected: str, printed: str) -> bool:
    return sorted(expected.split()) == sorted(printed.split()) and stdin.endswith("\n")


def broken(stdin: str, expected: str, printed: str) -> bool:
    raise RuntimeError("no idea")


def numbers(stdin: str, expected: str, printed: str) -> bool:
    return int(printed) == int(expected)


RELEASE = threading.Event()


def hangs(stdin: str, expected: str, printed: str) -> bool:
    return RELEASE.wait(60.0)


LOOPS: list[int] = []


def slow(stdin: str, expected: str, printed: str) -> bool:
    LOOPS.append(threading.get_ident())
    return True


@pytest.mark.slow
async def test_a_checker_that_raises_is_a_failure_of_the_infrastructure(grader: Grader) -> None:
    made = make(checker=f"{__name__}:broken")
    for _ in range(FAILURES - 1):
        verdict = await judge(grader, made, GOOD)
        assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None), verdict
        assert f"tasks.checker {__name__}:broken raised RuntimeError('no idea') (test_stdio.py line" in (
            verdict.reason
        )
    with pytest.raises(FunctionFailed, match="5 times in a row"):
        await judge(grader, made, GOOD)


@pytest.mark.slow
async def test_a_checker_that_cannot_read_an_output_calls_it_wrong(grader: Grader) -> None:
    made = make(checker=f"{__name__}:numbers")
    assert (await judge(grader, made, GOOD)).outcome is Outcome.RESOLVED
    verdict = await judge(grader, made, "print('none')\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict
    assert "a wrong output" in verdict.reason


@pytest.mark.slow
async def test_a_checker_that_hangs_stops_neither_the_event_loop_nor_the_grading(
    grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grading.runners.stdio.CHECK_S", 0.5)
    judging = asyncio.ensure_future(judge(grader, make(checker=f"{__name__}:hangs"), GOOD))
    while not judging.done():
        begun = time.monotonic()
        await asyncio.sleep(0.05)
        assert time.monotonic() - begun < 0.4
    RELEASE.set()
    verdict = await judging
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None), verdict
    assert "did not return within 0.5 s" in verdict.reason


@pytest.mark.slow
async def test_a_checker_runs_in_a_thread(grader: Grader) -> None:
    assert (await judge(grader, make(checker=f"{__name__}:slow"), GOOD)).outcome is Outcome.RESOLVED
    assert LOOPS
    assert threading.get_ident() not in LOOPS


@pytest.mark.slow
async def test_a_task_may_ask_for_more_memory(grader: Grader) -> None:
    program = "x = bytearray(600 << 20)\n" + GOOD
    task, oracle = make()
    assert (await judge(grader, (task, oracle), program)).outcome is Outcome.UNRESOLVED
    plan = replace(task.grading, memory_mb=1024)
    more = replace(task, grading=plan, content_hash=task_hash("p", FILES, plan))
    assert more.content_hash != task.content_hash
    assert (await judge(grader, (more, oracle), program)).outcome is Outcome.RESOLVED


@pytest.mark.slow
async def test_long_integers_are_printed(grader: Grader) -> None:
    task, _ = make()
    oracle = Oracle(task_id="t", exchanges=(Exchange(stdin="", expected=f"1{'0' * 5000}"),))
    verdict = await judge(grader, (task, oracle), "print(10**5000)\n")
    assert verdict.outcome is Outcome.RESOLVED, verdict


@pytest.mark.slow
async def test_a_checker_of_the_users_own_decides(grader: Grader) -> None:
    name = f"{__name__}:any_order"
    solved = await judge(grader, make(checker=name), GOOD)
    assert solved.outcome is Outcome.RESOLVED, solved
    with pytest.raises(TaskError, match=r"tasks\.checker: .*has no attribute nothing"):
        runner_for(*make(checker=f"{__name__}:nothing"))


def test_rows_that_cannot_be_judged() -> None:
    task, oracle = make()
    with pytest.raises(TaskError, match="no inputs with outputs"):
        runner_for(task, Oracle(task_id="t", gold=oracle.gold))
    with pytest.raises(TaskError, match="every expected output is empty"):
        runner_for(task, Oracle(task_id="t", exchanges=(Exchange(stdin="1", expected=" \n"),)))
