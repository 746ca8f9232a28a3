"""Sets of Python functions with asserts: MBPP, EvalPlus (HumanEval+ and MBPP+) and BigCodeBench.

What asserts say exactly becomes cases of runner `json_io`; the rest stays test code for runner `pytest`.
BigCodeBench's unittest classes always do.
"""

from __future__ import annotations

import ast
import hashlib
import re
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, Text
from insitu.tasks.shared import make_item, text_tree
from insitu.types import Case, GradingPlan, HiddenTests, Oracle, Setup
from insitu_tasksets.asserts import NotPlain, assert_case, literal_value, parse_python

ENTRY, TEST_FILE = "solution.py", "test_solution.py"
FLOAT_TOLERANCE = 1e-6
"""EvalPlus compares floats so where a row names no tolerance."""
Id = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]


def _signature(code: str, function: str) -> str:
    """Return the first lines of a solution up to the body of `function`, as a stub; raise TaskError."""
    for node in parse_python(code, "code").body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return f"def {function}({ast.unparse(node.args)}):\n    pass\n"
    raise TaskError(f"the solution has no function {function}")


def _pytest_file(*parts: str) -> HiddenTests:
    """Return a test file that imports all of the solution; a run of the solution finds its ids."""
    text = "\n".join(["from solution import *", *parts]) + "\n"
    return HiddenTests(files=text_tree({TEST_FILE: text}, "test"), fail_to_pass=(TEST_FILE,))


def _function_item(
    *,
    id: str,
    prompt: str,
    starter: str,
    gold: str,
    category: str,
    options: LoadOptions,
    cases: tuple[Case, ...] = (),
    tests: HiddenTests | None = None,
    image: str = "",
    timeout_s: float = 10.0,
) -> Item:
    """Cases, else tests."""
    runner = "json_io" if cases else "pytest"
    return make_item(
        id=id,
        prompt=prompt,
        files=text_tree({ENTRY: starter}, "starter"),
        setup=Setup(image=options.image(image, id)),
        grading=GradingPlan(runner=runner, entry=ENTRY, timeout_s=timeout_s),
        limits=options.limits,
        category=category,
        oracle=Oracle(
            task_id=id,
            cases=cases,
            tests=HiddenTests() if cases or tests is None else tests,
            gold=text_tree({ENTRY: gold}, "solution"),
        ),
    )


# --------------------------------------------------------------------------- MBPP


class _MbppRow(TaskRow):
    """Columns of the full and of the sanitized set."""

    task_id: Id
    text: Text = Field(validation_alias=AliasChoices("text", "prompt"))
    code: Text
    test_list: list[str]
    challenge_test_list: list[str] = Field(default_factory=list)
    test_setup_code: str = ""
    test_imports: list[str] = Field(default_factory=list)


class Mbpp(RowFormat):
    """Format `mbpp`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        found = _MbppRow.model_validate(row)
        asserts = [*found.test_list, *found.challenge_test_list]
        if not asserts:
            raise TaskError("test_list is empty: nothing can be graded")
        function = _tested_function("\n".join(asserts), found.code)
        stub = _signature(found.code, function)
        before = "\n".join([*found.test_imports, found.test_setup_code]).strip()
        head = stub.partition("\n")[0].removesuffix(":")
        return _function_item(
            id=f"mbpp/{found.task_id}",
            prompt=f"{found.text.strip()}\n\nWrite it in {ENTRY} as `{head}`.\n",
            starter=stub,
            gold=found.code,
            category="mbpp",
            options=options,
            cases=() if before else _assert_cases("\n".join(asserts), function),
            tests=_pytest_file(before, *(_as_test(text, n) for n, text in enumerate(asserts, 1))),
        )


def _tested_function(tests: str, code: str) -> str:
    """Return the function of the solution that the tests call; raise TaskError."""
    called = [
        node.func.id
        for node in ast.walk(parse_python(tests, "test_list"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    defined = [node.name for node in parse_python(code, "code").body if isinstance(node, ast.FunctionDef)]
    for name in called:
        if name in defined:
            return name
    raise TaskError("the tests call no function of the solution")


def _assert_cases(tests: str, function: str) -> tuple[Case, ...]:
    """Return a case for each assert, or () where an assert is more than a call and a value."""
    try:
        cases = [assert_case(node, function, function) for node in parse_python(tests, "tests").body]
    except NotPlain:
        return ()
    return tuple(case for case in cases if case is not None)


def _as_test(text: str, number: int) -> str:
    lines = text.strip().split("\n")
    return f"\n\ndef test_{number}():\n" + "\n".join(f"    {line}" for line in lines)


# --------------------------------------------------------------------------- EvalPlus


class _PlusRow(TaskRow):
    """Columns of HumanEval+ (entry_point, canonical_solution) and of MBPP+ (code, test_list)."""

    task_id: Id
    prompt: Text
    test: Text
    entry_point: str = ""
    canonical_solution: str = ""
    code: str = ""
    test_list: list[str] = Field(default_factory=list)


class EvalPlus(RowFormat):
    """Format `evalplus`: rows with the column `test`, as the sets are published for `datasets`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        found = _PlusRow.model_validate(row)
        if found.entry_point:
            function, gold = found.entry_point, found.prompt + found.canonical_solution
            starter = found.prompt + "    pass\n"
            prompt = f"Complete the function {function} in {ENTRY}.\n\n{found.prompt.strip()}\n"
        else:
            function = _tested_function("\n".join(found.test_list), found.code)
            gold, starter = found.code, _signature(found.code, function)
            head = starter.partition("\n")[0].removesuffix(":")
            prompt = f"{found.prompt.strip()}\n\nWrite it in {ENTRY} as `{head}`.\n"
        parse_python(gold, "the solution")
        # Where the asserts stand in the module they are run by its import.
        call = f"check({function})" if found.entry_point else "pass"
        return _function_item(
            id=f"evalplus/{found.task_id}",
            prompt=prompt,
            starter=starter,
            gold=gold,
            category="evalplus",
            options=options,
            cases=_plus_cases(found.test, function),
            tests=_pytest_file(
                f"from solution import {function}\n", found.test, f"\n\ndef test_all():\n    {call}\n"
            ),
            timeout_s=30.0,
        )


def _plus_cases(test: str, function: str) -> tuple[Case, ...]:
    """Return the cases of two lists of literals that a loop compares by `assertion`; () for other tests."""
    lists: dict[str, ast.expr] = {}
    meanings: dict[str, str] = {}
    loops: list[ast.For] = []
    for node in ast.walk(parse_python(test, "test")):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            lists.setdefault(node.targets[0].id, node.value)
        elif isinstance(node, ast.FunctionDef):
            meanings[node.name] = _meaning(node)
        elif isinstance(node, ast.For):
            loops.append(node)
    if not {"inputs", "results"} <= lists.keys() or len(loops) != 1:
        return ()
    if meanings.get("assertion") not in ASSERTIONS or meanings.get("is_floats") not in IS_FLOATS:
        return ()
    tolerance = _loop_tolerance(loops[0], function if "check" not in meanings else "candidate")
    try:
        inputs, results = literal_value(lists["inputs"]), literal_value(lists["results"])
    except NotPlain:
        return ()
    if tolerance is None or not isinstance(inputs, list) or not isinstance(results, list):
        return ()
    if len(inputs) != len(results):
        return ()
    return tuple(
        _plus_case(function, args, wanted, tolerance) for args, wanted in zip(inputs, results, strict=True)
    )


ASSERTIONS = ("1dda2052de12e982", "98ef7e0b265a2e3f", "e7b0160a3c465957", "e610353ec6a47ed7")
"""`assertion(out, exp, atol)` of equality, where floats may differ by atol or 1e-6, in the versions in which
the sets were published. Of other meaning are those of sets, of mere truth and of two right answers."""
IS_FLOATS = ("fe69f80aa3d5f149", "3ff8cd6a6f8503d7")
"""`is_floats(x)`: a float, or a list or a tuple of floats."""


def _meaning(node: ast.FunctionDef) -> str:
    """Return a hash of a function without its comments, docstring and messages."""
    copied = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(copied):
        if isinstance(part, ast.Assert):
            part.msg = None
        elif isinstance(part, ast.FunctionDef) and ast.get_docstring(part):
            part.body = part.body[1:]
    return hashlib.sha256(ast.unparse(copied).encode()).hexdigest()[:16]


def _loop_tolerance(loop: ast.For, called: str) -> float | None:
    """Return the last argument of the assertion of a loop; None unless it loops over inputs and results."""
    lines = ast.unparse(loop).split("\n")
    if len(lines) != 2 or lines[0] != "for i, (inp, exp) in enumerate(zip(inputs, results)):":
        return None
    found = re.fullmatch(rf"    assertion\({re.escape(called)}\(\*inp\), exp, ([0-9.e-]+)\)", lines[1])
    return float(found[1]) if found else None


def _plus_case(function: str, args: object, wanted: object, tolerance: float) -> Case:
    if not isinstance(args, list | tuple):
        raise TaskError("test: an input is not a list of arguments")
    return Case(
        function=function,
        args=tuple(args),
        expected=wanted,
        exact=False,
        tolerance=tolerance or (FLOAT_TOLERANCE if _is_floats(wanted) else 0.0),
    )


def _is_floats(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


# --------------------------------------------------------------------------- BigCodeBench


class _BigCodeRow(TaskRow):
    """Columns of BigCodeBench."""

    task_id: Text
    complete_prompt: Text
    canonical_solution: Text
    test: Text
    entry_point: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = "task_func"
    image: str = ""


class BigCodeBench(RowFormat):
    """Format `bigcodebench`. The tests need the set's libraries: an image, by tasks.images."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        found = _BigCodeRow.model_validate(row)
        gold = found.complete_prompt + found.canonical_solution
        parse_python(gold, "the solution")
        parse_python(found.test, "test")
        return _function_item(
            id=found.task_id,
            prompt=f"Complete {found.entry_point} in {ENTRY}.\n\n{found.complete_prompt.strip()}\n",
            starter=found.complete_prompt + "    pass\n",
            gold=gold,
            category="bigcodebench",
            options=options,
            tests=_pytest_file(f"from solution import {found.entry_point}\n", found.test),
            image=found.image,
            timeout_s=60.0,
        )
