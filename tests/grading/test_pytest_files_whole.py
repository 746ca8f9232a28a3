"""Test files that a row requires whole: their ids come from a run of the solution, in local sandboxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.config import load_config
from insitu.errors import TaskError
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.grading.trust import trust_of
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Item
from insitu.tasks.factory import open_rows
from insitu.types import FileEntry, Limits, Outcome, Verdict

pytestmark = pytest.mark.slow

CLASSES = """
import unittest
import pytest
from solution import double, Doubler

class Shared:
    def test_zero(self):
        assert double(0) == 0

class DoublerTest(Shared, unittest.TestCase):
    def setUp(self):
        self.it = Doubler(3)

    def test_value(self):
        self.assertEqual(self.it.value(), 6)

    @unittest.skip("not yet")
    def test_later(self):
        self.fail()

class TestMore:
    @pytest.mark.parametrize(("a", "b"), [(1, 2), (5, 10)], ids=["small", "large"])
    def test_pairs(self, a, b):
        assert double(a) == b

@pytest.fixture(params=[2, 4])
def number(request):
    return request.param

def test_number(number):
    assert double(number) == number + number
"""
SECOND = """
from helper import expected
from solution import double

def test_seven():
    assert double(7) == expected(7)
"""
HELPER = "def expected(x):\n    return {7: 14}[x]\n"
GOLD = """
def double(x):
    return 2 * x

class Doubler:
    def __init__(self, x): self.x = x
    def value(self): return double(self.x)
"""
IDS = {
    "tests/test_more.py::DoublerTest::test_value",
    "tests/test_more.py::DoublerTest::test_zero",
    "tests/test_more.py::TestMore::test_pairs[small]",
    "tests/test_more.py::TestMore::test_pairs[large]",
    "tests/test_more.py::test_number[2]",
    "tests/test_more.py::test_number[4]",
    "tests/seven_test.py::test_seven",
}


def row(**more: Any) -> dict[str, Any]:
    tests = {
        "tests/test_more.py": CLASSES,
        "tests/seven_test.py": SECOND,
        "tests/helper.py": HELPER,
        "tests/test_utils.py": "class Utils(dict):\n    pass\n",
    }
    starter = "def double(x): return 0\n"
    return {"id": "u", "prompt": "Write it.", "starter": starter, "solution": GOLD, "tests": tests} | more


def item_of(tmp_path: Path, given: dict[str, Any]) -> Item:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(given) + "\n")
    config = load_config(None, ["tasks.source=unit_tests", f"tasks.path={path}"])
    (item,) = open_rows(config, Limits(), runner_for).every()
    return item


@pytest.fixture
def grader() -> Grader:
    return Grader(LocalBackend(), GradeConfig(remember=0))


async def graded(grader: Grader, item: Item, solution: str) -> Verdict:
    after = {**item.task.files, "solution.py": FileEntry(content=solution.encode())}
    return await grader.grade(item.task, item.oracle, after)


@pytest.mark.full
async def test_classes_parameters_and_several_files(tmp_path: Path, grader: Grader) -> None:
    item = item_of(tmp_path, row())
    assert item.oracle.tests.fail_to_pass == (
        "tests/test_more.py",
        "tests/seven_test.py::test_seven",
        "tests/test_utils.py",
    )
    assert set((await grader.named(item.task, item.oracle)).tests.fail_to_pass) == IDS
    await grader.validate(item.task, item.oracle, repeats=1)
    solved = await graded(grader, item, GOLD)
    assert (solved.outcome, solved.fail_to_pass) == (Outcome.RESOLVED, (7, 7)), solved
    # A case that the candidate removes is missed: the ids are the solution's, not its own.
    fewer = GOLD + "\nimport pytest\npytest.mark.parametrize = lambda *a, **k: (lambda f: None)\n"
    verdict = await graded(grader, item, fewer)
    assert verdict.outcome in (Outcome.UNRESOLVED, Outcome.TAMPERED), verdict
    assert verdict.reward == 0.0
    wrong = await graded(grader, item, GOLD.replace("2 * x", "2 * x if x != 5 else 0"))
    # A file is not run further once a test is lost, so of the others some may not have been seen to pass.
    assert wrong.outcome is Outcome.UNRESOLVED, wrong
    assert 1 <= wrong.passed <= 6, wrong
    assert trust_of(item.task, item.oracle)[0] in ("standard", "weak")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"solution": GOLD.replace("2 * x", "3 * x")}, "tests/test_more.py, with the solution: .* failed"),
        ({"solution": "x = 1\n"}, "pytest cannot import it"),
        ({"tests": {"test_a.py": "import os\nos._exit(0)\n"}}, "it did not run to its end"),
        ({"tests": {"test_a.py": "class A:\n    pass\nclass B(A):\n    pass\n"}}, "no test passes"),
    ],
)
async def test_a_solution_that_does_not_pass_its_tests_makes_the_row_unusable(
    tmp_path: Path, grader: Grader, more: dict[str, Any], why: str
) -> None:
    item = item_of(tmp_path, row(**more))
    with pytest.raises(TaskError, match=why):
        await grader.validate(item.task, item.oracle, repeats=1)
