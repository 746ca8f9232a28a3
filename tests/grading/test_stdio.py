"""Runner `stdio`: programs in local sandboxes, what counts as the same output, and what a cheat sees."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from insitu.errors import FunctionFailed, TaskError
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import opened_runners, runner_for
from insitu.sandbox.local import LocalBackend
from insitu.tasks.user_functions import FAILURES
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
from insitu_tasksets.runners.stdio import same_output

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
    monkeypatch.setattr("insitu.grading.grader.pressure_s", lambda: 0.0)
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
import os, pathlib, time
known = "that-stays"
def alive(pid):
    try: return known in pathlib.Path(f"/proc/{pid}/comm").read_text()
    except OSError: return False
if input() == "1":
    child = os.fork()
    if not child:
        os.setsid()
        pathlib.Path("/proc/self/comm").write_text(known)
        time.sleep(600)
    print("first")
else:
    print("alive" if any(alive(pid) for pid in os.listdir("/proc") if pid.isdigit()) else "gone")
"""
    task, _ = make()
    oracle = Oracle(
        task_id="t",
        exchanges=(Exchange(stdin="1", expected="first"), Exchange(stdin="2", expected="gone")),
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


CHECKERS = """
import os, pathlib, re, sys, time

def any_order(stdin, expected, printed):
    print("a line of the checker's own")
    return sorted(expected.split()) == sorted(printed.split()) and stdin.endswith("\\n")

async def awaited(stdin, expected, printed):
    return expected.split() == printed.split()

def like_numpy(stdin, expected, printed):
    return type("bool_", (int,), {})(expected.split() == printed.split())

def broken(stdin, expected, printed):
    raise RuntimeError("no idea")

def numbers(stdin, expected, printed):
    return int(printed) == int(expected)

def first_word(stdin, expected, printed):
    return printed.split()[0] == expected.split()[0]

def ratio(stdin, expected, printed):
    return abs(float(expected) / float(printed) - 1) < 1e-6

def shape(stdin, expected, printed):
    # What is expected is a note for people: only programs print what this can read.
    return [3, 30, 12][int(printed.split("\\n")[-2]) // 12] > 0 if printed.endswith("\\n") else 1 / 0

def forgets(stdin, expected, printed):
    if printed.split() == expected.split():
        return True

def nan(stdin, expected, printed):
    return True if printed.split() == expected.split() else float("nan")

def text(stdin, expected, printed):
    return printed.split() == expected.split() or "wrong answer"

def always_text(stdin, expected, printed):
    return "ok"

def exits(stdin, expected, printed):
    return printed.split() == expected.split() or sys.exit(1)

def dies(stdin, expected, printed):
    return printed.split() == expected.split() or os._exit(1)

def never(stdin, expected, printed):
    time.sleep(60.0)

def holds_the_interpreter(stdin, expected, printed):
    return printed.split() == expected.split() or bool(re.fullmatch("(a+)+b", "a" * 64))

seen = set()

def remembers(stdin, expected, printed):
    seen.add(printed)
    if "0\\n" in seen:
        raise KeyError("once seen, for ever")
    return printed.split() == expected.split()

def now_and_then(stdin, expected, printed):
    seen = pathlib.Path(__file__).with_name("seen")
    seen.write_bytes(seen.read_bytes() + b"." if seen.exists() else b"")
    if len(seen.read_bytes()) % 2:
        raise ConnectionError
    return printed.split() == expected.split()
"""


@pytest.fixture(scope="module")
def checkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("checkers") / "mine.py"
    path.write_text(CHECKERS)
    yield str(path)
    for runner in opened_runners():
        runner.close()


@pytest.mark.slow
async def test_a_program_that_loops_on_every_input_ends_after_a_few(grader: Grader) -> None:
    task, oracle = make("fraction", timeout_s=1.0)
    many = replace(oracle, exchanges=(*EXCHANGES[:1], *(Exchange(stdin="9 9", expected="18"),) * 30))
    program = "line = input()\nwhile line == '9 9':\n    pass\n" + GOOD.replace("input()", "line")
    verdict = await judge(grader, (task, many), program)
    assert (verdict.outcome, verdict.passed, verdict.total) == (Outcome.TEST_TIMEOUT, 1, 31), verdict
    assert verdict.reason.endswith("input 1: out of CPU time; not run after 3 out of time: 27")


KEEPS = """
import os, pathlib
a, b = map(int, input().split())
places = [pathlib.Path(place, "kept") for place in (".", "/tmp", "/dev/shm", os.path.expanduser("~"))]
seen = [str(path) for path in places if path.exists()]
for path in places:
    path.write_text("x")
pathlib.Path("solution.py").write_text("print(0)")
os.mkdir("/tmp/a-folder")
print(seen or a + b)
"""


@pytest.mark.slow
async def test_no_program_finds_the_files_of_an_earlier_run(grader: Grader) -> None:
    verdict = await judge(grader, make(), KEEPS)
    assert verdict.outcome is Outcome.RESOLVED, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", r"raised RuntimeError('no idea') (mine.py line"),
        ("always_text", "returned 'ok', not True or False"),
        ("never", "did not return within 0.5 s"),
    ],
)
async def test_a_checker_that_fails_on_what_is_expected_is_a_failure_of_the_infrastructure(
    grader: Grader, checkers: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu_tasksets.runners.checker.CHECK_S", 0.5)
    made = make(checker=f"{checkers}:{name}")
    for _ in range(FAILURES - 1):
        verdict = await judge(grader, made, GOOD)
        assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None), verdict
        assert f"tasks.checker {checkers}:{name} {said}" in verdict.reason
    with pytest.raises(FunctionFailed, match="5 times in a row"):
        await judge(grader, made, GOOD)


WRONG = {
    "first_word": ("input()\n", "raised IndexError('list index out of range') (mine.py line"),
    "ratio": ("print(0)\n", "raised ZeroDivisionError('float division by zero') (mine.py line"),
    "shape": ("print(40)\n", "raised IndexError("),
    "forgets": ("print(0)\n", "returned None, not True or False"),
    "nan": ("print(0)\n", "returned nan, not True or False"),
    "text": ("print(0)\n", "returned 'wrong answer', not True or False"),
    "exits": ("print(0)\n", "raised SystemExit(1)"),
    "remembers": ("print(0)\n", "raised KeyError('once seen, for ever') (mine.py line"),
    "dies": ("print(0)\n", "ended its process"),
    "holds_the_interpreter": ("print(0)\n", "did not return within 1 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
async def test_an_output_on_which_a_working_checker_fails_is_wrong_and_named(
    grader: Grader, checkers: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu_tasksets.runners.checker.CHECK_S", 1.0)
    program, said = WRONG[name]
    made = make(checker=f"{checkers}:{name}")
    assert (await judge(grader, made, GOOD)).outcome is Outcome.RESOLVED
    for _ in range(FAILURES if name == "ratio" else 1):
        verdict = await judge(grader, made, program)
        assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict
        assert f"input 0: the checker {said}" in verdict.reason
        assert verdict.controls == "the checker failed on 1 outputs and works on right ones"
    assert (await judge(grader, made, GOOD)).outcome is Outcome.RESOLVED


@pytest.mark.slow
async def test_many_outputs_that_hang_a_checker_leave_it_working(
    grader: Grader, checkers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu_tasksets.runners.checker.CHECK_S", 0.5)
    made = make(checker=f"{checkers}:holds_the_interpreter")
    wrong = await asyncio.gather(*(judge(grader, made, "print(0)\n") for _ in range(6)))
    assert [verdict.reward for verdict in wrong] == [0.0] * 6, wrong
    assert (await judge(grader, made, GOOD)).outcome is Outcome.RESOLVED


@pytest.mark.slow
async def test_an_expected_output_that_is_empty_is_no_control_but_the_solutions_is(
    grader: Grader, checkers: str
) -> None:
    task, oracle = make(checker=f"{checkers}:shape")
    empty = tuple(replace(one, expected="") for one in oracle.exchanges)
    nothing_known = replace(oracle, exchanges=empty, gold={})
    verdict = await judge(grader, (task, nothing_known), "print(40)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None), verdict
    verdict = await judge(grader, (task, replace(oracle, exchanges=empty)), "print(40)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict


@pytest.mark.slow
async def test_a_checker_that_fails_now_and_then_is_asked_again(grader: Grader, checkers: str) -> None:
    made = make(checker=f"{checkers}:now_and_then")
    assert (await judge(grader, made, GOOD)).outcome is Outcome.RESOLVED
    verdict = await judge(grader, made, "print(0)\n")
    assert verdict.reason.endswith("input 0: a wrong output"), verdict


@pytest.mark.slow
async def test_a_checker_that_cannot_read_an_output_calls_it_wrong(grader: Grader, checkers: str) -> None:
    made = make(checker=f"{checkers}:numbers")
    assert (await judge(grader, made, GOOD)).outcome is Outcome.RESOLVED
    verdict = await judge(grader, made, "print('none')\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict
    assert "a wrong output" in verdict.reason


@pytest.mark.slow
async def test_a_checker_that_hangs_does_not_stop_the_event_loop(
    grader: Grader, checkers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu_tasksets.runners.checker.CHECK_S", 1.0)
    made = make(checker=f"{checkers}:holds_the_interpreter")
    judging = asyncio.ensure_future(judge(grader, made, "print(0)\n"))
    turns = 0
    while not judging.done():
        await asyncio.sleep(0.05)
        turns += 1
    assert turns > 8
    assert (await judging).reward == 0.0


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
@pytest.mark.parametrize("name", ["any_order", "awaited", "like_numpy"])
async def test_a_checker_of_the_users_own_decides(grader: Grader, checkers: str, name: str) -> None:
    solved = await judge(grader, make(checker=f"{checkers}:{name}"), GOOD)
    assert solved.outcome is Outcome.RESOLVED, solved
    with pytest.raises(TaskError, match=r"tasks\.checker: .*has no attribute nothing"):
        runner_for(*make(checker=f"{checkers}:nothing"))


def test_rows_that_cannot_be_judged() -> None:
    task, oracle = make()
    with pytest.raises(TaskError, match="no inputs with outputs"):
        runner_for(task, Oracle(task_id="t", gold=oracle.gold))
    with pytest.raises(TaskError, match="every expected output is empty"):
        runner_for(task, Oracle(task_id="t", exchanges=(Exchange(stdin="1", expected=" \n"),)))
