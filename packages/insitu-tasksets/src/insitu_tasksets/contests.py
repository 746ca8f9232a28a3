"""Programming contests: APPS, TACO and CodeContests; LiveCodeBench is in live_code_bench.py.

A problem is either a program that reads standard input and prints (runner `stdio`), or a function or a method
of a class Solution (runner `json_io`). Inputs and outputs go to the oracle, with the first of the row's
solutions that is Python 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, Text
from insitu.tasks.shared import make_item, text_tree
from insitu.types import Case, Exchange, GradingPlan, Oracle
from insitu_tasksets.asserts import parse_python

ENTRY = "solution.py"
PROGRAM = (
    "Write a Python 3 program in {entry} that reads standard input and prints the answer.\n\n{question}\n"
)
FUNCTION = "Write {name} in {entry}, in Python 3. Keep its name and its parameters.\n\n{question}\n"
IMPORTS = """\
import bisect
import collections
import copy
import functools
import heapq
import itertools
import json
import math
import operator
import random
import re
import string
import sys
import time
from typing import *
from bisect import *
from collections import *
from copy import deepcopy
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, cos, exp, fabs, factorial, floor, gcd, inf, isqrt, log, log2, pi, prod, sin, sqrt

"""
"""The sets put such lines before a solution, and starters and solutions rely on them (`List`). Not among
them: numpy, which APPS imports too."""
TIMEOUT_S = 10.0
"""CPU seconds per input, where a row names none; never less: limits of contests are meant for C++."""
MEMORY_MB = 1024
"""Memory, where a row names none or less, for the same reason."""
PYTHON3 = 3
"""Of CodeContests' languages."""


def json_column(value: object) -> object:
    """Parse a column that holds JSON as text; an empty text is null."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of any set: programs have exchanges, functions cases."""

    id: str
    question: str
    category: str
    function: str = ""
    starter: str = ""
    solutions: Sequence[str] = ()
    exchanges: tuple[Exchange, ...] = ()
    by_line: bool = False
    tolerance: float = 1e-6
    cases: tuple[Case, ...] = ()
    timeout_s: float = TIMEOUT_S
    memory_mb: int = MEMORY_MB


def problem_item(problem: Problem, options: LoadOptions) -> Item:
    """Return the item of a problem; raise TaskError."""
    if not problem.exchanges and not problem.cases:
        raise TaskError("the row has no inputs with outputs: nothing can be graded")
    if problem.function:
        prompt = FUNCTION.format(name=problem.function, entry=ENTRY, question=problem.question.strip())
    else:
        prompt = PROGRAM.format(entry=ENTRY, question=problem.question.strip())
    solution = _gold(problem.solutions)
    starter = IMPORTS + problem.starter if problem.function else problem.starter
    return make_item(
        id=problem.id,
        prompt=prompt,
        files=text_tree({ENTRY: starter if starter.strip() else "\n"}, "starter_code"),
        grading=GradingPlan(
            runner="json_io" if problem.cases else "stdio",
            entry=ENTRY,
            timeout_s=max(TIMEOUT_S, problem.timeout_s),
            memory_mb=max(MEMORY_MB, problem.memory_mb),
        ),
        limits=options.limits,
        category=problem.category,
        oracle=Oracle(
            task_id=problem.id,
            cases=problem.cases,
            exchanges=problem.exchanges,
            checker=options.checker,
            by_line=problem.by_line,
            tolerance=problem.tolerance,
            gold=text_tree({ENTRY: solution}, "solution") if solution else {},
        ),
    )


def _gold(solutions: Sequence[str]) -> str:
    """Return the first solution in Python 3; empty without one."""
    return next((text for text in solutions if _is_python(text)), "")


def _is_python(text: str) -> bool:
    """Whether a solution can be Python 3: sets have Python 2 among them."""
    try:
        return bool(parse_python(text, "").body)
    except ValueError:
        return False


def _text(value: object) -> str:
    """Return an input or output as text; a list holds its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value) + "\n"
    if value is None or isinstance(value, dict):
        raise TaskError("input_output: an input or an output is not a text")
    return str(value)


# --------------------------------------------------------------------------- APPS and TACO


TOLERANCE = 1e-5
"""By how much outputs may differ: the set compares with numpy.allclose."""


class _InputOutput(TaskRow):
    """The column input_output."""

    inputs: list[Any] = Field(default_factory=list)
    outputs: list[Any] = Field(default_factory=list)
    fn_name: str | None = None


class _AppsRow(TaskRow):
    """Columns of APPS; TACO has them too, without problem_id."""

    problem_id: int | str | None = None
    question: Text
    solutions: Annotated[list[str] | None, BeforeValidator(json_column)] = None
    input_output: Annotated[_InputOutput | None, BeforeValidator(json_column)] = None
    starter_code: str | None = None
    time_limit: str | None = None
    memory_limit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AppsFormat(RowFormat):
    """Formats `apps` and `taco`."""

    name: str

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _AppsRow.model_validate(row)
        tests = parsed.input_output or _InputOutput()
        if len(tests.inputs) != len(tests.outputs):
            raise TaskError(f"input_output: {len(tests.inputs)} inputs, {len(tests.outputs)} outputs")
        starter = parsed.starter_code or ""
        pairs = list(zip(tests.inputs, tests.outputs, strict=True))
        function = tests.fn_name or ""
        gold = _gold(parsed.solutions or ())
        shown = starter if starter.strip() else gold
        named = f"Solution.{function}" if function and "class Solution" in shown else function
        # A set without ids: rows are named by their place.
        name = str(place.number if parsed.problem_id is None else parsed.problem_id)
        problem = Problem(
            id=f"{self.name}/{name}",
            question=parsed.question,
            category=self.name,
            function=named,
            starter=starter,
            solutions=(IMPORTS + gold,) if gold else (),
            exchanges=() if named else tuple(Exchange(stdin=_text(a), expected=_text(b)) for a, b in pairs),
            tolerance=TOLERANCE,
            cases=tuple(_call(named, a, b) for a, b in pairs) if named else (),
            timeout_s=seconds_of(parsed.time_limit),
            memory_mb=megabytes_of(parsed.memory_limit),
        )
        return problem_item(problem, options)


def _call(function: str, args: object, expected: object) -> Case:
    """Return a case that compares with the output, which may be the value in a list."""
    if not isinstance(args, list):
        raise TaskError("input_output: the inputs of a function are not a list of arguments")
    if args and isinstance(args[0], dict):
        args = [_int_keys(args[0])]
    if isinstance(expected, dict):
        expected = _int_keys(expected)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        expected = [_int_keys(one) if isinstance(one, dict) else one for one in expected]
    wrapped = not isinstance(expected, dict)
    return Case(
        function=function, args=tuple(args), expected=expected, exact=False, wrapped=wrapped, lists=True
    )


def _int_keys(value: dict[str, object]) -> dict[Any, object]:
    """JSON made texts of the keys: the set turns them back where all are integers."""
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def seconds_of(text: str | None) -> float:
    """`2.0 seconds`, `2000 ms`, `None`; 0 where nothing is said."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)\s*(ms|milli)?", text or "")
    return float(found[1]) / (1000 if found[2] else 1) if found else 0.0


def megabytes_of(text: str | None) -> int:
    """`256.0 megabytes`, `None`; 0 where nothing is said."""
    found = re.match(r"\s*(\d+)(?:\.\d+)?\s*mega", text or "")
    return int(found[1]) if found else 0


# --------------------------------------------------------------------------- CodeContests


class _ContestTests(TaskRow):
    """public_tests, private_tests, generated_tests."""

    input: list[str] = Field(default_factory=list)
    output: list[str] = Field(default_factory=list)


class _ContestSolutions(TaskRow):
    """Texts with their languages: 0 unknown, 1 Python 2, 2 C++, 3 Python 3, 4 Java."""

    language: list[int] = Field(default_factory=list)
    solution: list[str] = Field(default_factory=list)


class _TimeLimit(TaskRow):
    seconds: int = 0
    nanos: int = 0


class _ContestRow(TaskRow):
    """The columns of CodeContests that insitu uses."""

    name: Text
    description: Text
    public_tests: _ContestTests = _ContestTests()
    private_tests: _ContestTests = _ContestTests()
    generated_tests: _ContestTests = _ContestTests()
    solutions: _ContestSolutions = _ContestSolutions()
    time_limit: _TimeLimit | None = None
    memory_limit_bytes: int = 0
    input_file: str = ""
    output_file: str = ""


class CodeContests(RowFormat):
    """Format `code_contests`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _ContestRow.model_validate(row)
        if parsed.input_file or parsed.output_file:
            raise TaskError("the program reads or writes a file: only standard input and output work")
        exchanges: list[Exchange] = []
        for tests in (parsed.public_tests, parsed.private_tests, parsed.generated_tests):
            if len(tests.input) != len(tests.output):
                raise TaskError(f"{len(tests.input)} inputs, {len(tests.output)} outputs")
            pairs = zip(tests.input, tests.output, strict=True)
            exchanges += [Exchange(stdin=given, expected=wanted) for given, wanted in pairs]
        limit = parsed.time_limit or _TimeLimit()
        solved = zip(parsed.solutions.language, parsed.solutions.solution, strict=False)
        problem = Problem(
            id=parsed.name,
            question=parsed.description,
            category="code_contests",
            solutions=[text for language, text in solved if language == PYTHON3],
            exchanges=tuple(exchanges),
            timeout_s=limit.seconds + limit.nanos / 1e9,
            memory_mb=parsed.memory_limit_bytes >> 20,
        )
        return problem_item(problem, options)


APPS = _AppsFormat(name="apps")
TACO = _AppsFormat(name="taco")
