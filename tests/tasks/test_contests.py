# ruff: noqa: E501
"""Rows of contests, of function sets and of exercises: what they become, and which are refused. That they are
judged is tests/grading/test_grader_sources.py's."""

from __future__ import annotations

import ast
import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import TaskError
from insitu.grading.runners.find import runner_for
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowSource
from insitu.tasks.factory import format_of
from insitu_tasksets import function_sets
from insitu_tasksets.contests import megabytes_of, seconds_of


def load(tmp_path: Path, name: str, *given: dict[str, Any], options: LoadOptions | None = None) -> list[Item]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return list(RowSource(name, format_of(name), path, options, check=runner_for).every())


def apps(**more: Any) -> dict[str, Any]:
    reported = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    return {
        "problem_id": 7,
        "question": "Add.",
        "starter_code": "",
        "input_output": json.dumps(reported),
    } | more


def test_a_program_and_what_it_must_print(tmp_path: Path) -> None:
    row = apps(solutions=json.dumps(["print 'two'", "print(3)\n"]))
    (item,) = load(tmp_path, "apps", row, options=LoadOptions(checker="os.path:join"))
    assert (item.task.id, item.task.grading.runner, item.task.grading.entry) == (
        "apps/7",
        "stdio",
        "solution.py",
    )
    assert [(one.stdin, one.expected) for one in item.oracle.exchanges] == [("1 2\n", "3\n")]
    assert item.oracle.gold["solution.py"].content.endswith(b"\n\nprint(3)\n")
    assert item.task.grading.memory_mb == 1024
    assert item.oracle.checker == "os.path:join"
    assert "3" not in item.task.prompt.replace("Python 3", "")


def test_a_set_without_ids_is_named_by_line(tmp_path: Path) -> None:
    one, two = apps(question="A", solutions=None), apps(question="B", input_output=apps()["input_output"])
    del one["problem_id"], two["problem_id"]
    assert [item.task.id for item in load(tmp_path, "taco", one, two)] == ["taco/1", "taco/2"]


def call(**more: Any) -> str:
    return json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]} | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input_output": ""}, ": the row has no inputs with outputs"),
        ({"input_output": "{"}, "input_output: is not JSON"),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": []})}, "1 inputs, 0 outputs"),
        ({"input_output": json.dumps({"inputs": [None], "outputs": ["1"]})}, "is not a text"),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": [""]})}, "every expected output is empty"),
        ({"input_output": call(inputs=["1"])}, "not a list of arguments"),
        ({"question": ""}, "question: String should have at least 1 character"),
    ],
)
def test_rows_of_apps_that_cannot_be_graded(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, "apps", apps(**more))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("2.0 seconds", 2.0), ("1500 ms", 1.5), ("None", 0.0), (None, 0.0), ("", 0.0)]
)
def test_time_limits_as_the_sets_write_them(text: str | None, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "megabytes"), [("256.0 megabytes", 256), ("2048 megabytes", 2048), ("None", 0), (None, 0)]
)
def test_memory_limits_as_the_sets_write_them(text: str | None, megabytes: int) -> None:
    assert megabytes_of(text) == megabytes


def test_a_row_with_more_memory_gets_it(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "taco", apps(memory_limit="2048.0 megabytes"))
    assert item.task.grading.memory_mb == 2048
    tests = {"input": ["1"], "output": ["1"]}
    row = {"name": "a", "description": "b", "public_tests": tests, "memory_limit_bytes": 3 << 30}
    (item,) = load(tmp_path, "code_contests", row)
    assert item.task.grading.memory_mb == 3072


def test_keys_that_were_integers_are_integers_again(tmp_path: Path) -> None:
    reported = call(inputs=[[{"1": 2, "3": 4}]], outputs=[{"1": 6}])
    (item,) = load(tmp_path, "apps", apps(input_output=reported))
    (case,) = item.oracle.cases
    assert (case.args, case.expected, case.lists) == (({1: 2, 3: 4},), {1: 6}, True)
    reported = call(inputs=[[{"a": 2}, 1]], outputs=[[{"1": 6}]])
    (item,) = load(tmp_path, "apps", apps(question="Other", input_output=reported))
    (case,) = item.oracle.cases
    assert (case.args, case.expected) == (({"a": 2},), [{1: 6}])


def test_a_solution_says_what_is_called_where_no_starter_does(tmp_path: Path) -> None:
    method = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b\n"
    plain = "def add(a, b):\n    return a + b\n"
    rows = [
        apps(problem_id=n, question=f"Add {n}", input_output=call(), solutions=json.dumps([text]))
        for n, text in enumerate((method, plain))
    ]
    items = load(tmp_path, "apps", *rows)
    assert [item.oracle.cases[0].function for item in items] == ["Solution.add", "add"]


def test_long_integers_are_read(tmp_path: Path) -> None:
    reported = json.dumps({"fn_name": "add", "inputs": [[10**5000, 1]], "outputs": [[10**5000 + 1]]})
    (item,) = load(tmp_path, "apps", apps(input_output=reported))
    assert item.oracle.cases[0].args == (10**5000, 1)


def test_live_code_bench_compares_by_line_and_exactly(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "live_code_bench", live())
    assert (item.oracle.by_line, item.oracle.tolerance) == (True, 0.0)
    (item,) = load(tmp_path, "apps", apps())
    assert (item.oracle.by_line, item.oracle.tolerance) == (False, 1e-5)


def test_a_contest_that_reads_a_file_is_refused(tmp_path: Path) -> None:
    tests = {"input": ["1"], "output": ["1"]}
    row = {"name": "a", "description": "b", "public_tests": tests, "input_file": "input.txt"}
    with pytest.raises(TaskError, match="reads or writes a file"):
        load(tmp_path, "code_contests", row)
    with pytest.raises(TaskError, match="1 inputs, 2 outputs"):
        load(
            tmp_path,
            "code_contests",
            row | {"input_file": "", "public_tests": tests | {"output": ["1", "2"]}},
        )


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path(os.environ["BOMB"])),)


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def live(**more: Any) -> dict[str, Any]:
    tests = [{"input": "1", "output": "1", "testtype": "stdin"}]
    return {"question_id": "a", "question_content": "b", "public_test_cases": json.dumps(tests)} | more


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"private_test_cases": "no base64!"}, "private_test_cases: is neither JSON nor packed tests"),
        ({"private_test_cases": packed(3)}, "private_test_cases: Input should be a valid list"),
        ({"public_test_cases": "[]"}, "no inputs with outputs"),
        (
            {"public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "x"}])},
            "tests of type x",
        ),
        (
            {"public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "functional"}])},
            "functional tests need metadata.func_name",
        ),
    ],
)
def test_rows_of_live_code_bench_that_cannot_be_graded(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, "live_code_bench", live(**more))
    assert message in str(caught.value)


def test_packed_tests_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "made"))
    with pytest.raises(TaskError, match=r"packed tests: holds (posix|os)\.mkdir"):
        load(tmp_path, "live_code_bench", live(private_test_cases=packed(Bomb())))
    assert not (tmp_path / "made").exists()


def mbpp(**more: Any) -> dict[str, Any]:
    return {"task_id": 1, "text": "Add.", "code": "def add(a, b=1):\n    return a + b\n",
            "test_list": ["assert add(1) == 2", "assert add((1,), (2,)) == (1, 2)"]} | more  # fmt: skip


def test_mbpp_asserts_become_cases(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "mbpp", mbpp())
    assert item.task.grading.runner == "json_io"
    assert [(c.args, c.expected) for c in item.oracle.cases] == [((1,), 2), (((1,), (2,)), (1, 2))]
    assert "`def add(a, b=1)`" in item.task.prompt
    assert item.task.files["solution.py"].content == b"def add(a, b=1):\n    pass\n"
    assert "assert" not in item.task.prompt
    (other,) = load(tmp_path, "mbpp", mbpp(test_setup_code="X = 1"))
    assert other.task.grading.runner == "pytest"
    assert b"def test_2():\n    assert add((1,)" in other.oracle.tests.files["test_solution.py"].content


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"test_list": []}, "test_list is empty"),
        ({"test_list": ["assert other(1) == 2"]}, "the tests call no function of the solution"),
        ({"code": "def add(:\n"}, "code is not Python"),
        ({"test_list": ["assert add("]}, "test_list is not Python"),
    ],
)
def test_rows_of_mbpp_that_cannot_be_graded(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, "mbpp", mbpp(**more))
    assert message in str(caught.value)


FLOATS = """import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float) or isinstance(x, (list, tuple)) and all(isinstance(i, float) for i in x)

"""
EQUAL = """
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if atol != 0 and out != exp:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp

"""
AS_SETS = "def assertion(out, exp, atol):\n    assert set(out) == set(exp)\n\n"
AS_TRUTH = "def assertion(out, exp, atol):\n    assert exp == (out is not None)\n\n"


@pytest.fixture(autouse=True)
def _own_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know the functions above beside the ones that EvalPlus publishes."""
    for name, text in (("IS_FLOATS", FLOATS), ("ASSERTIONS", EQUAL)):
        (node,) = (part for part in ast.parse(text).body if isinstance(part, ast.FunctionDef))
        known = getattr(function_sets, name)
        monkeypatch.setattr(function_sets, name, (*known, function_sets._meaning(node)))


PLUS_ROW = {
    "task_id": 1,
    "prompt": "x",
    "code": "def f(a):\n    return a\n",
    "test_list": ["assert f(1) == 1"],
}
LOOP = "inputs = [[1], [2], [3]]\nresults = [1, 0.5, [[0.5]]]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion({}, exp, {})\n"


def test_evalplus_takes_the_tolerance_of_its_row(tmp_path: Path) -> None:
    test = FLOATS + EQUAL + LOOP.format("f(*inp)", "0")
    (item,) = load(tmp_path, "evalplus", PLUS_ROW | {"test": test})
    assert [case.tolerance for case in item.oracle.cases] == [0.0, 1e-6, 0.0]
    (item,) = load(tmp_path, "evalplus", PLUS_ROW | {"test": FLOATS + EQUAL + LOOP.format("f(*inp)", "1e-3")})
    assert [case.tolerance for case in item.oracle.cases] == [1e-3, 1e-3, 1e-3]


@pytest.mark.parametrize(
    "test",
    [
        FLOATS + AS_SETS + LOOP.format("f(*inp)", "0"),
        AS_TRUTH + LOOP.format("f(*inp)", "0"),
        FLOATS + EQUAL + LOOP.format("sorted(f(*inp))", "0"),
        FLOATS + EQUAL.replace("assert out == exp", "assert out is exp") + LOOP.format("f(*inp)", "0"),
        FLOATS.replace("float", "int") + EQUAL + LOOP.format("f(*inp)", "0"),
        FLOATS + EQUAL + LOOP.format("f(*inp)", "0").replace("zip(inputs", "zip(inputs[1:]"),
    ],
    ids=["sets", "truth", "sorted", "is", "floats", "slice"],
)
def test_evalplus_asserts_of_another_meaning_stay_with_pytest(tmp_path: Path, test: str) -> None:
    (item,) = load(tmp_path, "evalplus", PLUS_ROW | {"test": test})
    assert (item.task.grading.runner, item.oracle.cases) == ("pytest", ())


def test_bigcodebench_takes_its_image_from_the_configuration(tmp_path: Path) -> None:
    head = "def task_func(a):\n"
    row = {"task_id": "BigCodeBench/1", "complete_prompt": head, "canonical_solution": "    return a\n",
           "test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"}  # fmt: skip
    (item,) = load(tmp_path, "bigcodebench", row, options=LoadOptions(images={"": "set:1"}))
    assert item.task.setup.image == "set:1"
    assert item.oracle.tests.fail_to_pass == ("test_solution.py",)


def exercise(root: Path, files: dict[str, Any], *, folder: str = "two-fer") -> Path:
    made = root / "exercises" / folder
    for name, text in {
        ".meta/config.json": json.dumps({"files": files}),
        ".meta/example.py": "x = 2\n",
        ".docs/instructions.md": "Do it.",
        ".docs/introduction.md": "Hello.",
        "a.py": "x = 1\n",
        "a_test.py": "def test_a(): pass\n",
        "helper.py": "y = 1\n",
    }.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return root


GOOD = {"solution": ["a.py"], "test": ["a_test.py"], "example": [".meta/example.py"]}


def test_an_exercise(tmp_path: Path) -> None:
    (item,) = RowSource("p", format_of("polyglot"), exercise(tmp_path, GOOD), check=runner_for).every()
    assert item.task.id == "two-fer"
    assert item.task.prompt.endswith("Hello.\nDo it.\n")
    assert set(item.task.files) == {"a.py"}
    assert set(item.oracle.tests.files) == {"a_test.py", "helper.py"}
    assert item.oracle.gold["a.py"].content == b"x = 2\n"
    assert item.oracle.tests.fail_to_pass == ("a_test.py",)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (GOOD | {"solution": ["../a.py"]}, "is not a path inside the work folder"),
        (GOOD | {"solution": ["b.py"]}, "b.py"),
        (GOOD | {"solution": ["a.go"], "test": ["a_test.go"]}, "a.go: only exercises in Python"),
        (GOOD | {"test": []}, "names no solution or no test"),
        (GOOD | {"example": []}, "takes a solution"),
        (GOOD | {"example": [".meta/example.py", "a.py"]}, "2 examples for 1 solution files"),
    ],
)
def test_exercises_that_cannot_be_graded(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        RowSource("p", format_of("polyglot"), exercise(tmp_path, files), check=runner_for)
    assert message in str(caught.value)
    with pytest.raises(TaskError, match="holds no exercise"):
        RowSource("p", format_of("polyglot"), tmp_path / "exercises" / "two-fer" / ".docs")
