"""HumanEval and unit-test rows: which become cases, which stay tests, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import TaskError
from insitu.grading.runners.find import runner_for
from insitu.tasks.base import Item
from insitu.tasks.dataset import Format, RowSource
from insitu_tasksets.asserts import cases_of, plain_tests
from insitu_tasksets.unit_tests import HumanEval, UnitTests


def load(tmp_path: Path, form: Format, *rows: dict[str, Any]) -> list[Item]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(RowSource("test", form, path, check=runner_for).every())


def humaneval(**more: Any) -> dict[str, Any]:
    return {
        "task_id": "Made/0",
        "prompt": 'def triple(x: int) -> int:\n    """ Three times x. """\n',
        "entry_point": "triple",
        "canonical_solution": "    return 3 * x\n",
        "test": "\nMETADATA = {'author': 'us'}\n\ndef check(candidate):\n    assert candidate(2) == 6\n"
        '    assert candidate(-1) == -3, "sign"\n    assert True\n',
    } | more


def test_asserts_on_values_become_cases(tmp_path: Path) -> None:
    (item,) = load(tmp_path, HumanEval(), humaneval())
    assert item.task.grading.runner == "json_io"
    assert [(c.args, c.expected, c.exact) for c in item.oracle.cases] == [
        ((2,), 6, False),
        ((-1,), -3, False),
    ]
    assert item.task.files["solution.py"].content.endswith(b'x. """\n    pass\n')
    assert item.oracle.gold["solution.py"].content.endswith(b'x. """\n    return 3 * x\n')
    assert "3 * x" not in item.task.prompt
    assert item.oracle.tests.files == {}


def body(*lines: str) -> str:
    return "def check(candidate):\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("line", "args", "expected"),
    [
        ("assert candidate([1, [2.5]], 'a') == {'k': [None, True]}", ([1, [2.5]], "a"), {"k": [None, True]}),
        ("assert candidate(3 * 19) == 2 ** 10 - 1", (57,), 1023),
        ("assert candidate('a' + 'b') == -1.5, 'why'", ("ab",), -1.5),
        ("assert candidate() == []", (), []),
        ("assert candidate((1, 'a')) == (1, [2])", ((1, "a"),), (1, [2])),
        ("assert candidate({1: (2,)}) == {3, 4}", ({1: (2,)},), {3, 4}),
    ],
)
def test_values_that_are_literals(line: str, args: tuple[object, ...], expected: object) -> None:
    (case,) = cases_of(body(line), "f")
    assert (case.function, case.args, case.expected) == ("f", args, expected)


@pytest.mark.parametrize(
    "line",
    [
        "assert candidate(1)",
        "assert not candidate(1)",
        "assert candidate(1) != 2",
        "assert candidate(1) is True",
        "assert abs(candidate(1.5) - 0.5) < 1e-6",
        "assert tuple(candidate([1])) == tuple([1])",
        "assert candidate(1) == helper(1)",
        "assert candidate(x=1) == 1",
        "assert candidate(*[1]) == 1",
        "assert candidate(1e999) == 1",
        "assert candidate(1) == 10 ** 1000000",
        "assert candidate(b'x') == 1",
        "assert candidate({[1]}) == 1",
        "assert candidate({[1]: 2}) == 1",
        "assert candidate(set()) == 1",
        "assert False",
        "for i in range(3): assert candidate(i) == i",
        "import math",
        "x = 3",
    ],
)
def test_whatever_says_more_stays_a_test(line: str) -> None:
    assert cases_of(body("assert candidate(0) == 0", line), "f") == ()


def test_code_beside_the_check_keeps_it_a_test() -> None:
    assert cases_of("import math\n" + body("assert candidate(1) == 1"), "f") == ()
    assert cases_of("X = set('a')\n" + body("assert candidate(1) == 1"), "f") == ()
    assert cases_of("X = {'a': 1}\n" + body("assert candidate(1) == 1"), "f") != ()


def test_other_tests_go_to_pytest_whole(tmp_path: Path) -> None:
    (item,) = load(
        tmp_path, HumanEval(), humaneval(test=body("for i in range(5):", "    assert candidate(i) == 3 * i"))
    )
    assert item.task.grading.runner == "pytest"
    assert item.task.grading.entry == "solution.py"
    assert item.oracle.tests.fail_to_pass == ("test_solution.py::test_check",)
    text = item.oracle.tests.files["test_solution.py"].content.decode()
    assert text.startswith("from solution import *\nfrom solution import triple\n")
    assert text.endswith("def test_check():\n    check(triple)\n")
    assert "test_solution.py" not in item.task.files


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"test": "x = 1\n"}, "row Made/0: test has no function check"),
        ({"test": "def check(:\n"}, "row Made/0: test is not Python"),
        ({"prompt": "def triple(x:\n"}, "prompt is not Python"),
        ({"canonical_solution": "    return (\n"}, "canonical_solution is not Python"),
        ({"canonical_solution": ""}, "canonical_solution: String should have at least 1"),
        ({"canonical_solution": "    pass\n"}, "the gold solution changes nothing"),
        ({"entry_point": "a b"}, "entry_point: String should match pattern"),
        ({"task_id": 7}, "row 7: task_id: Input should be a valid string"),
    ],
)
def test_humaneval_rows_that_cannot_be_graded(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, HumanEval(), humaneval(**more))
    assert message in str(caught.value)


def unit(**more: Any) -> dict[str, Any]:
    return {"id": "u1", "prompt": "Write double(x)."} | more


PYTEST = (
    "from solution import double\n\ndef test_one():\n    assert double(1) == 2\n"
    "\ndef test_two():\n    assert double(2) == 4\n"
)


def test_unit_rows_with_tests(tmp_path: Path) -> None:
    (item,) = load(tmp_path, UnitTests(), unit(test=PYTEST, solution="def double(x):\n    return 2 * x\n"))
    assert item.task.grading.runner == "pytest"
    assert item.oracle.tests.fail_to_pass == ("test_solution.py::test_one", "test_solution.py::test_two")
    assert item.oracle.gold["solution.py"].content == b"def double(x):\n    return 2 * x\n"
    assert set(item.task.files) == {"solution.py"}


def test_unit_rows_with_cases_and_other_column_names(tmp_path: Path) -> None:
    cases = [{"function": "double", "args": [2], "expected": 4}]
    given = {
        "task_id": "u2",
        "prompt": "p",
        "cases": cases,
        "starter": "# here\n",
        "files": {"data.txt": "1"},
    }
    (one, two) = load(tmp_path, UnitTests(), given, unit(test_code=PYTEST))
    assert one.task.grading.runner == "json_io"
    assert one.oracle.cases[0].exact
    assert set(one.task.files) == {"solution.py", "data.txt"}
    assert two.task.grading.runner == "pytest"


def test_julia_rows_run_a_script_that_must_come_to_its_end(tmp_path: Path) -> None:
    (item,) = load(tmp_path, UnitTests(), unit(language="julia", test="@test double(1) == 2"))
    (check,) = item.oracle.tests.checks
    assert item.task.grading.runner == "command"
    assert check.command == "julia --startup-file=no hidden_tests.jl"
    text = item.oracle.tests.files["hidden_tests.jl"].content.decode()
    assert text.splitlines()[:3] == ["using Test", 'include("solution.jl")', "@test double(1) == 2"]
    assert text.rstrip().endswith(f'println("{check.markers[0]}")')


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "row u1: needs one of cases, test (test_code) and tests"),
        ({"test": "x = 1"}, "test_solution.py holds no test: nothing can be graded"),
        ({"test": "def test_x(:"}, "test is not Python"),
        ({"test": "class TestX:\n    def test_a(self): pass\n"}, "takes a solution; without one, name them"),
        ({"tests": {"helper.py": "x = 1\n"}}, "tests has no file named test_*.py or *_test.py"),
        ({"tests": {"test_a.py": PYTEST}, "test": PYTEST}, "needs one of cases, test (test_code) and tests"),
        ({"tests": {"../test_a.py": PYTEST}}, "tests: '../test_a.py' is not a path inside the work folder"),
        ({"test": PYTEST, "fail_to_pass": "test_one"}, "neither a list nor JSON"),
        ({"language": "perl", "test": "x"}, "row u1: language: Input should be 'python' or 'julia'"),
        (
            {"language": "julia", "cases": [{"function": "f", "args": [], "expected": 1}]},
            "cases need language = python",
        ),
        ({"test": PYTEST, "timeout_s": 0}, "timeout_s: Input should be greater than 0"),
        ({"test": PYTEST, "entry": "/etc/passwd"}, "is not a path inside the work folder"),
    ],
)
def test_unit_rows_that_cannot_be_graded(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, UnitTests(), unit(**more))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        "class TestA:\n    def test_b(self): pass\n",
        "import unittest\n\nclass Cases(unittest.TestCase):\n    def test_b(self): pass\n",
        "import pytest\n\n@pytest.mark.parametrize('a', [1, 2])\ndef test_b(a): pass\n",
        "import pytest\n\n@pytest.fixture(params=[1, 2])\ndef number(request): return request.param\n",
        "from shared import *\n",
        "from shared import test_b\n",
        "def pytest_generate_tests(metafunc): pass\n",
        "if True:\n    def test_b(): pass\n",
        "test_b = lambda: None\n",
        "for n in range(3):\n    globals()[f'test_{n}'] = lambda: None\n",
        "def test_a(): pass\n",
    ],
)
def test_what_only_pytest_can_tell_is_left_to_it(tmp_path: Path, more: str) -> None:
    test = "def test_a(): pass\n" + more
    assert plain_tests(test) is None
    (item,) = load(tmp_path, UnitTests(), unit(test=test, solution="x = 1\n"))
    assert item.oracle.tests.fail_to_pass == ("test_solution.py",)


def test_helpers_classes_and_a_main_block_hide_no_test() -> None:
    test = """
import math
from solution import double

LIMIT = 3

class Helper:
    pass

def make(): return Helper()

def test_a(): assert double(1) == 2

if __name__ == '__main__':
    test_a()
"""
    assert plain_tests(test) == ["test_a"]


def test_several_test_files_with_helpers(tmp_path: Path) -> None:
    tests = {
        "tests/test_a.py": "from tests.util import one\n\ndef test_a(): assert one() == 1\n",
        "tests/b_test.py": "class TestB:\n    def test_b(self): pass\n",
        "tests/util.py": "def one(): return 1\n",
    }
    (item,) = load(tmp_path, UnitTests(), unit(tests=tests, solution="x = 1\n", gold={"more.py": "y = 1\n"}))
    assert item.oracle.tests.fail_to_pass == ("tests/test_a.py::test_a", "tests/b_test.py")
    assert set(item.oracle.tests.files) == set(tests)
    assert set(item.oracle.gold) == {"solution.py", "more.py"}
