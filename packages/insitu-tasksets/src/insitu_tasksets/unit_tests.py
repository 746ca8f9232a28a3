"""Formats `humaneval` and `unit_tests`: one file to write, judged by hidden tests or cases.

HumanEval's asserts become json_io cases where these say exactly the same (asserts.py), else a hidden
pytest file. Rows of `unit_tests` bring cases, or test code in Python (pytest) or Julia (a script that must
exit 0; not tried on a machine with Julia).
"""

from __future__ import annotations

import ast
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.own_formats import CaseRow
from insitu.tasks.row_files import OwnIds, RawRow, RowLocation, TaskRow, Text
from insitu.tasks.shared import LimitsRow, make_item, text_tree
from insitu.types import Case, Check, FileEntry, GradingPlan, HiddenTests, Oracle, Tree
from insitu_tasksets.asserts import cases_of, parse_python, plain_tests

ENTRY = {"python": "solution.py", "julia": "solution.jl"}
TEST_FILE = {"python": "test_solution.py", "julia": "hidden_tests.jl"}
JULIA_DONE = "insitu: all tests passed"


class _HumanEvalRow(TaskRow):
    """The five columns of the set."""

    task_id: Text
    prompt: Text
    entry_point: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    canonical_solution: Text
    test: Text

    @model_validator(mode="after")
    def _parses(self) -> Self:
        parse_python(self.prompt + "    pass\n", "prompt")
        parse_python(self.prompt + self.canonical_solution, "canonical_solution")
        names = [n.name for n in parse_python(self.test, "test").body if isinstance(n, ast.FunctionDef)]
        if "check" not in names:
            raise ValueError("test has no function check: nothing can be graded")
        return self


class HumanEval(RowFormat):
    """Format `humaneval`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _HumanEvalRow.model_validate(row)
        entry = ENTRY["python"]
        cases = cases_of(parsed.test, parsed.entry_point)
        return make_item(
            id=parsed.task_id,
            prompt=f"Complete the function {parsed.entry_point} in {entry}. Keep its name and its parameters."
            f"\n\n{parsed.prompt.strip()}\n",
            files=text_tree({entry: parsed.prompt + "    pass\n"}, "prompt"),
            grading=GradingPlan(runner="json_io" if cases else "pytest", entry=entry),
            limits=options.limits,
            category="humaneval",
            oracle=Oracle(
                task_id=parsed.task_id,
                cases=cases,
                tests=HiddenTests() if cases else _checked_by(parsed),
                gold=text_tree({entry: parsed.prompt + parsed.canonical_solution}, "canonical_solution"),
            ),
        )


def _checked_by(row: _HumanEvalRow) -> HiddenTests:
    """Return the set's own test, run in the namespace of the module."""
    text = (
        "from solution import *\n"
        f"from solution import {row.entry_point}\n\n"
        f"{row.test}\n\n\n"
        f"def test_check():\n    check({row.entry_point})\n"
    )
    path = TEST_FILE["python"]
    return HiddenTests(files={path: FileEntry(content=text.encode())}, fail_to_pass=(f"{path}::test_check",))


class _UnitTestRow(TaskRow):
    """A single file to write. Column names of HumanEval and of code sets with hidden test_code are taken."""

    id: str = Field(validation_alias=AliasChoices("id", "task_id"), min_length=1)
    prompt: Text
    language: Literal["python", "julia"] = "python"
    entry: str = ""
    starter: str = ""
    """The file at the start; empty = it is not there yet."""
    test: str = Field(default="", validation_alias=AliasChoices("test", "test_code"))
    tests: dict[str, str] = Field(default_factory=dict)
    """Hidden files by path: test files (test_*.py, *_test.py) and what they need."""
    cases: list[CaseRow] = Field(default_factory=list)
    fail_to_pass: OwnIds = ()
    solution: str = ""
    """The whole solved file."""
    gold: dict[str, str] = Field(default_factory=dict)
    """More files of the solution."""
    files: dict[str, str] = Field(default_factory=dict)
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    limits: LimitsRow = LimitsRow()
    category: str = ""

    @model_validator(mode="after")
    def _gradable(self) -> Self:
        ways = [bool(self.cases), bool(self.test.strip()), bool(self.tests)]
        if sum(ways) != 1:
            raise ValueError("needs one of cases, test (test_code) and tests: nothing can be graded")
        if self.tests and self.language != "python":
            raise ValueError("tests need language = python")
        if self.cases and self.language != "python":
            raise ValueError("cases need language = python")
        if self.test and self.language == "python":
            parse_python(self.test, "test")
        return self


class UnitTests(RowFormat):
    """Format `unit_tests`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _UnitTestRow.model_validate(row)
        entry = parsed.entry or ENTRY[parsed.language]
        files: dict[str, FileEntry] = dict(text_tree(parsed.files, "files"))
        # A work folder with nothing in it would have no base to fail.
        files |= text_tree({entry: parsed.starter or "\n"}, "starter")
        runner, tests, cases = _judged_by(parsed, entry)
        solution = {entry: parsed.solution} if parsed.solution else {}
        return make_item(
            id=parsed.id,
            prompt=parsed.prompt,
            files=files,
            grading=GradingPlan(runner=runner, entry=entry, timeout_s=parsed.timeout_s),
            limits=parsed.limits.over(options.limits),
            category=parsed.category or parsed.language,
            oracle=Oracle(
                task_id=parsed.id,
                cases=cases,
                tests=tests,
                gold=text_tree({**solution, **parsed.gold}, "solution"),
            ),
        )


def _judged_by(row: _UnitTestRow, entry: str) -> tuple[str, HiddenTests, tuple[Case, ...]]:
    if row.cases:
        return "json_io", HiddenTests(), tuple(one.case for one in row.cases)
    path = TEST_FILE[row.language]
    if row.language == "julia":
        text = f'using Test\ninclude("{entry}")\n{row.test}\nprintln("{JULIA_DONE}")\n'
        check = Check(name=path, command=f"julia --startup-file=no {path}", markers=(JULIA_DONE,))
        return "command", HiddenTests(files=_one(path, text), checks=(check,)), ()
    hidden = row.tests or {path: row.test}
    names = list(hidden) if row.test else [name for name in hidden if _is_test_file(name)]
    ids = row.fail_to_pass or tuple(one for name in names for one in _ids(name, hidden[name]))
    if not names:
        raise TaskError("tests has no file named test_*.py or *_test.py: nothing can be graded")
    if not ids:
        raise TaskError(f"{', '.join(names)} holds no test: nothing can be graded")
    return "pytest", HiddenTests(files=text_tree(hidden, "tests"), fail_to_pass=ids), ()


def _is_test_file(path: str) -> bool:
    """By name, as pytest has it."""
    name = path.rpartition("/")[2]
    return name.endswith("_test.py") or (name.startswith("test_") and name.endswith(".py"))


def _ids(path: str, text: str) -> list[str]:
    """Ids of the tests of a file; the file itself where only a run of pytest can tell them."""
    try:
        names = plain_tests(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise TaskError(f"{path} is not Python") from None
    return [path] if names is None else [f"{path}::{name}" for name in names]


def _one(path: str, text: str) -> Tree:
    return {path: FileEntry(content=text.encode())}
