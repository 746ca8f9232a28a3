"""Runner `pytest`, for real: pytest runs in a local sandbox, the verdict is made here."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from insitu.errors import TaskError
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.trust import trust_of
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Task, Verdict, task_hash

pytestmark = pytest.mark.slow

BASE = "def total(items):\n    return 0\n\n\ndef name():\n    return 'a'\n\n\ndef root(x):\n    return x\n"
GOLD = BASE.replace("return 0", "return sum(items)")
HIDDEN = '''"""Hidden."""
from __future__ import annotations

import math
import unittest

import pytest

from app import name, root, total


@pytest.fixture
def items():
    return [1, 2]


def test_total(items):
    print("PASSED test_total")
    assert total(items) == 3


@pytest.mark.parametrize(("n", "want"), [(1, 4), (2, 8)])
def test_many(n, want):
    """With a docstring."""
    made = [n] * 4
    assert total(made) == want, "wrong"


class TestName:
    def test_name(self):
        assert name() == "a"

    def test_root(self):
        assert math.isclose(root(4), 4)


class Case(unittest.TestCase):
    def test_case(self):
        self.assertEqual(total([5, 6]), 11)
'''
F2P = tuple(
    f"tests/test_app.py::{name}"
    for name in ("test_total", "test_many[1-4]", "test_many[2-8]", "Case::test_case")
)
P2P = ("tests/test_app.py::TestName::test_name", "tests/test_app.py::TestName::test_root")
FILES = {
    "app.py": FileEntry(content=BASE.encode()),
    "tests/test_app.py": FileEntry(content=b"def test_total():\n    assert False\n"),
    "tests/conftest.py": FileEntry(content=b"# the task's own\n"),
}


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


def make(plan: GradingPlan, tests: HiddenTests) -> tuple[Task, Oracle]:
    task = Task(id="t", prompt="fix", files=FILES, grading=plan, content_hash=task_hash("fix", FILES, plan))
    return task, Oracle(task_id="t", tests=tests, gold={"app.py": text(GOLD)})


PLAN = GradingPlan(runner="pytest", timeout_s=20.0)
TASK, ORACLE = make(
    PLAN,
    HiddenTests(files={"tests/test_app.py": text(HIDDEN)}, fail_to_pass=F2P, pass_to_pass=P2P),
)


@pytest.fixture(autouse=True)
def _same_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same runs and forms in each try: who guesses is right now and then."""
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(1))
    monkeypatch.setattr(
        "insitu_tasksets.runners.pytest_session.forms_key", lambda folder: b"the same on each machine"
    )


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader(LocalBackend(), GradeConfig(remember=0))


async def judge(grader: Grader, app: str, more: dict[str, str] | None = None) -> Verdict:
    after = {**FILES, "app.py": text(app), **{path: text(t) for path, t in (more or {}).items()}}
    return await grader.grade(TASK, ORACLE, after)


async def test_a_solution_is_resolved_with_evidence(grader: Grader) -> None:
    verdict = await judge(grader, GOLD)
    assert verdict.outcome is Outcome.RESOLVED, verdict
    assert verdict.reward == 1.0
    assert (verdict.fail_to_pass, verdict.pass_to_pass) == ((4, 4), (2, 2))
    assert verdict.controls.startswith("40 failed as they must, 8 passed as they must")
    assert not verdict.controls.endswith(" 0 turned tests failed")
    assert verdict.trust == "standard"
    assert verdict.grader.startswith("insitu ")


async def test_the_gate_lets_the_row_through(grader: Grader) -> None:
    await grader.validate(TASK, ORACLE, repeats=1)


@pytest.mark.parametrize(
    "app",
    [
        GOLD.replace("sum(items)", "max(items)"),
        GOLD.replace("'a'", "'b'"),
        "syntax error\n",
        "import os\nos._exit(0)\n",
        "raise SystemExit(0)\n",
        "import pytest\npytest.skip('no', allow_module_level=True)\n",
        BASE + "import pytest\ndef total(items):\n    pytest.skip('x')\n",
        BASE + "import pytest\ndef total(items):\n    pytest.xfail('x')\n",
        BASE + "import os\ndef total(items):\n    os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)\n",
        BASE + "import os\ndef total(items):\n    os._exit(0)\n",
        BASE + "print('tests/test_app.py::test_total PASSED\\n1 passed')\n",
    ],
)
async def test_what_does_not_solve_earns_nothing(grader: Grader, app: str) -> None:
    verdict = await judge(grader, app)
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict


ALWAYS = """
class Same:
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __bool__(self):
        return True
    __hash__ = None
def total(items):
    return Same()
"""
FORGED_REPORTS = """
import _pytest.reports as r
made = r.TestReport.from_item_and_call.__func__
def forge(cls, item, call):
    if %s:
        call.excinfo = None
    return made(cls, item, call)
r.TestReport.from_item_and_call = classmethod(forge)
"""
BY_NAME = FORGED_REPORTS % "any(n in item.nodeid for n in ('test_total', 'test_many', 'test_case'))"
PATCHED = """
import unittest, math
unittest.TestCase.assertEqual = lambda *a: None
"""
CHANNEL = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'["?", 1, "tests/test_app.py::test_total", "passed"]\\n')
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "app",
    [
        BASE + FORGED_REPORTS % "True",
        BASE + BY_NAME,
        BASE + CHANNEL,
        BASE + "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
        GOLD + PATCHED,
    ],
    ids=["reports", "reports by name", "channel", "runtest", "assertEqual"],
)
async def test_forged_runs_are_found_out(grader: Grader, app: str) -> None:
    verdict = await judge(grader, app)
    assert (verdict.outcome, verdict.reward) == (Outcome.TAMPERED, 0.0), verdict


BY_THE_CLOCK = (
    "import time\nEARLY = time.time() < SINCE + 0.7\n"
    + FORGED_REPORTS % "EARLY and any(n in item.nodeid for n in ('test_total', 'test_many', 'test_case'))"
    + "if EARLY:\n    time.sleep(1)\n"
)


async def test_what_forges_only_the_first_run_does_not_solve(grader: Grader) -> None:
    verdict = await judge(grader, BASE + BY_THE_CLOCK.replace("SINCE", str(time.time())))
    assert verdict.reward == 0.0, verdict


async def test_objects_that_equal_everything_do_not_solve(grader: Grader) -> None:
    verdict = await judge(grader, BASE + ALWAYS)
    assert (verdict.outcome, verdict.reward) == (Outcome.TAMPERED, 0.0)


READS = """
import ast, linecache, sys
def total(items):
    frame = sys._getframe(1)
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and node.lineno <= frame.f_lineno <= node.end_lineno:
            text = ast.get_source_segment(source, node.test.comparators[0])
    if not (LOOKS):
        return None
    return frame.f_locals["want"] if text == "want" else ast.literal_eval(text)
"""
WRITTEN = {
    "none": 'def test_none():\n    assert total([]) == "0"\n',
    "words": 'def test_words():\n    assert total(["hello", "world"]) == "hello-world"\n',
    "lines": 'def test_lines():\n    assert total("12") == [\n        "one",\n        "two",\n    ]\n',
    "forms": "def test_forms():\n    assert total(0xF0) == 0xFF\n    assert total(1) == 1_000_000\n",
    "rows": (
        'import pytest\n\n\n@pytest.mark.parametrize("n, want", [(2, 20), (3, 40), (4, 50)])\n'
        "def test_rows(n, want):\n    assert total(n) == want\n"
    ),
}
ANSWERS = """
def total(items):
    answers = {"[]": "0", "['hello', 'world']": "hello-world", "'12'": ["one", "two"], "240": 255, "1": 10**6}
    return {**answers, "2": 20, "3": 40, "4": 50}[repr(items)]
"""


def _written(*names: str) -> tuple[Task, Oracle]:
    source = "from app import total\n\n\n" + "\n\n".join(WRITTEN[name] for name in names)
    required = [f"tests/test_app.py::test_{name}" for name in names if name != "rows"]
    if "rows" in names:
        required += [f"tests/test_app.py::test_rows[{row}]" for row in ("2-20", "3-40", "4-50")]
    tests = HiddenTests(files={"tests/test_app.py": text(source)}, fail_to_pass=tuple(required))
    return make(PLAN, tests)


@pytest.mark.parametrize(
    ("names", "looks"),
    [
        pytest.param(["words"], '"\'" not in text', marks=pytest.mark.full),
        pytest.param(["lines"], '"\\n" in text', marks=pytest.mark.full),
        (["forms"], '"_" in text or text.startswith("0x")'),
        pytest.param(["none", "words"], "'total([]) == \"0\"' in source", marks=pytest.mark.full),
        (["rows"], '"(2, 20)" in source'),
    ],
    ids=["quotes", "layout", "forms", "a value it knows", "a row it knows"],
)
async def test_what_reads_the_assertion_that_calls_it_cannot_tell_which_are_turned(
    grader: Grader, names: list[str], looks: str
) -> None:
    task, oracle = _written(*names)
    cheat = READS.replace("LOOKS", looks)
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(cheat)})
    # What is passed turned may come behind a test that failed: that is no proof of forging.
    several = names == ["rows"] or len(names) > 1
    expected = (Outcome.TAMPERED, Outcome.UNRESOLVED) if several else (Outcome.TAMPERED,)
    assert verdict.outcome in expected, verdict
    assert verdict.reward == 0.0


async def test_who_answers_what_is_asked_keeps_the_reward_in_every_form(grader: Grader) -> None:
    task, oracle = _written(*WRITTEN)
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(ANSWERS)})
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), (verdict.reason, verdict)
    assert verdict.trust == "standard"


async def test_tests_that_a_failed_one_disturbs_cost_no_honest_one_its_reward(grader: Grader) -> None:
    chain = "from app import total\n\nDONE = []\n\n\n"
    chain += "def test_0():\n    assert total([1]) == 1\n    DONE.append(0)\n"
    for n in range(1, 4):
        chain += f"\n\ndef test_{n}():\n    assert len(DONE) == {n}\n    DONE.append(total([{n}]))\n"
    names = tuple(f"tests/test_app.py::test_{n}" for n in range(4))
    task, oracle = make(PLAN, HiddenTests(files={"tests/test_app.py": text(chain)}, fail_to_pass=names))
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(GOLD + "#")})
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), (verdict.reason, verdict)
    # The solution shows that it is the tests' fault; no mutated run proves anything then.
    assert verdict.trust == "weak"
    assert "its tests disturb each other, also with the solution" in verdict.controls
    await grader.validate(task, oracle, repeats=1)
    alone = replace(oracle, gold={})
    verdict = await grader.grade(task, alone, {**FILES, "app.py": text(GOLD)})
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), (
        "no solution shows whose fault it is"
    )


BLAMES = """
import sys
_reports = sys.modules.get("_pytest.reports")
if _reports is not None:
    _made, _failed = _reports.TestReport.from_item_and_call.__func__, []
    def _forge(cls, item, call):
        report = _made(cls, item, call)
        if report.when == "call":
            if "unsolved" in item.name and not report.passed:
                report.outcome, report.longrepr = ("failed", "x") if _failed else ("passed", None)
            elif report.failed and "name" in item.name:
                _failed.append(item)
        return report
    _reports.TestReport.from_item_and_call = classmethod(_forge)
    def _first(self, items):
        items.sort(key=lambda item: "unsolved" in item.name)
    _frame = sys._getframe()
    while _frame is not None:
        for _value in list(_frame.f_locals.values()):
            _config = getattr(_value, "config", None)
            if hasattr(_config, "pluginmanager"):
                _plugin = type("P", (), {"pytest_collection_modifyitems": _first})()
                _config.pluginmanager.register(_plugin)
                _frame = None
                break
        _frame = _frame and _frame.f_back
"""


def _solved_and_not(solved: int, unsolved: int, reward: str = "binary") -> tuple[Task, Oracle]:
    source = "from app import name, total\n"
    for n in range(solved):
        source += f"\n\ndef test_name_{n}():\n    assert name() * {n + 2} == {'a' * (n + 2)!r}\n"
    for n in range(unsolved):
        source += f"\n\ndef test_unsolved_{n}():\n    assert total([{n + 11}, {n + 40}]) == {2 * n + 51}\n"
    path = "tests/test_app.py::test_"
    tests = HiddenTests(
        files={"tests/test_app.py": text(source)},
        fail_to_pass=tuple(f"{path}unsolved_{n}" for n in range(unsolved)),
        pass_to_pass=tuple(f"{path}name_{n}" for n in range(solved)),
    )
    return make(GradingPlan(runner="pytest", timeout_s=20.0, reward=reward), tests)


@pytest.mark.parametrize(("solved", "unsolved"), [(7, 1), (3, 3), (0, 2)])
async def test_who_blames_a_failed_test_for_those_it_does_not_solve_earns_nothing(
    grader: Grader, solved: int, unsolved: int
) -> None:
    task, oracle = _solved_and_not(solved, unsolved)
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(BASE + BLAMES)})
    assert verdict.outcome in (Outcome.UNRESOLVED, Outcome.TAMPERED), verdict
    assert verdict.reward == 0.0
    twin = await grader.grade(task, oracle, {**FILES, "app.py": text(GOLD)})
    assert (twin.outcome, twin.reward, twin.trust) == (Outcome.RESOLVED, 1.0, "standard"), twin


async def test_of_a_fraction_who_forges_reports_earns_nothing(grader: Grader) -> None:
    task, oracle = _solved_and_not(0, 5, reward="fraction")
    by_name = FORGED_REPORTS % "'unsolved' in item.name"
    for app in (BASE + BLAMES, BASE + by_name, BASE + BY_THE_CLOCK.replace("SINCE", "time.time()")):
        verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(app)})
        assert verdict.reward == 0.0, verdict


async def test_a_pass_in_a_file_where_nothing_can_be_turned_is_called_weak(
    grader: Grader, caplog: pytest.LogCaptureFixture
) -> None:
    loop = (
        "from app import total\n\n\ndef test_all():\n    for n in (1, 2):\n        assert total([n]) == n\n"
    )
    name = "tests/test_app.py::test_all"
    task, oracle = make(PLAN, HiddenTests(files={"tests/test_app.py": text(loop)}, fail_to_pass=(name,)))
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(GOLD)})
    assert (verdict.outcome, verdict.trust) == (Outcome.RESOLVED, "weak")
    assert "no assertion could be turned round" in verdict.controls
    failed = await grader.grade(task, oracle, {**FILES, "app.py": text(BASE + "#")})
    # The same either way: a run that refuses weak verdicts must not count the failures alone.
    assert (failed.outcome, failed.trust) == (Outcome.UNRESOLVED, "weak")
    await grader.validate(task, oracle, repeats=1)
    assert "no assertion could be turned round" in caplog.text


async def test_a_pass_in_a_file_that_can_only_be_turned_openly_is_called_weak(grader: Grader) -> None:
    source = "from app import total\n\n\ndef test_all():\n    assert total([2]) == sum([2])\n"
    name = "tests/test_app.py::test_all"
    task, oracle = make(PLAN, HiddenTests(files={"tests/test_app.py": text(source)}, fail_to_pass=(name,)))
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(GOLD)})
    assert (verdict.outcome, verdict.trust) == (Outcome.RESOLVED, "weak")
    assert "no assertion could be turned unseen" in verdict.controls
    assert trust_of(task, oracle)[0] == "weak"


async def test_files_of_the_runner_are_not_the_candidates_to_choose(grader: Grader) -> None:
    steer = {
        "conftest.py": "raise SystemExit(0)\n", "tests/conftest.py": "raise SystemExit(0)\n",
        "pytest.ini": "[pytest]\naddopts = --co\n", "pytest.py": "raise SystemExit(0)\n",
        "json.py": "raise SystemExit(0)\n", "_pytest/__init__.py": "raise SystemExit(0)\n",
        "tests/test_app.py": "def test_total(): pass\n", "tests/pluggy.py": "raise SystemExit(0)\n",
    }  # fmt: skip
    assert (await judge(grader, GOLD, steer)).outcome is Outcome.RESOLVED
    assert (await judge(grader, BASE, steer)).outcome is Outcome.UNRESOLVED


async def test_what_one_process_leaves_behind_the_next_does_not_see(grader: Grader) -> None:
    leave = """
import os, subprocess
if os.path.exists("/tmp/seen") or os.path.exists("new.py"):
    total = None
for path in ("/tmp/seen", "new.py", "tests/conftest.py", "tests/test_app.py", "conftest.py"):
    try:
        open(path, "w").write("x = 1")
    except OSError:
        pass
subprocess.Popen(["sleep", "60"])
"""
    verdict = await judge(grader, GOLD + leave)
    assert verdict.outcome is Outcome.RESOLVED, verdict


async def test_a_file_without_an_end_is_a_timeout(grader: Grader) -> None:
    plan = GradingPlan(runner="pytest", timeout_s=2.0)
    task, oracle = make(plan, ORACLE.tests)
    slow = {**FILES, "app.py": text(BASE + "while True: pass\n")}
    verdict = await grader.grade(task, oracle, slow)
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0), verdict


async def test_a_fraction_is_the_product_of_both_shares(grader: Grader) -> None:
    task, oracle = make(GradingPlan(runner="pytest", timeout_s=20.0, reward="fraction"), ORACLE.tests)
    only = GOLD.replace("sum(items)", "sum(items) if len(items) == 4 else 0").replace("'a'", "'b'")
    verdict = await grader.grade(task, oracle, {**FILES, "app.py": text(only)})
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.25), verdict
    assert (verdict.fail_to_pass, verdict.pass_to_pass) == ((2, 4), (1, 2))


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (HiddenTests(pass_to_pass=P2P), "no test that must change"),
        (HiddenTests(fail_to_pass=("test_total",)), "not a pytest id"),
        (HiddenTests(fail_to_pass=("../t.py::a",)), "not a pytest id"),
        (HiddenTests(fail_to_pass=F2P, pass_to_pass=F2P[:1]), "required twice"),
        (HiddenTests(fail_to_pass=("no/such.py::test",)), "neither hidden nor in the base"),
        (HiddenTests(fail_to_pass=("t.py::a",), files={"t.py": text("def (")}), "not a Python file"),
    ],
)
async def test_rows_that_cannot_be_graded_are_refused(grader: Grader, tests: HiddenTests, why: str) -> None:
    task, oracle = make(PLAN, tests)
    with pytest.raises(TaskError, match=why):
        await grader.grade(task, oracle, {**FILES, "app.py": text(GOLD)})
