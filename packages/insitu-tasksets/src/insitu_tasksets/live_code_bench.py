"""LiveCodeBench's code generation: programs and functions, without solutions."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, Text
from insitu.types import Case, Exchange
from insitu_tasksets.contests import Problem, json_column, problem_item


class _LiveTest(TaskRow):
    input: str
    output: str
    testtype: str = "stdin"


def _live_tests(value: object) -> object:
    """JSON as text; of private tests also packed: base64 of zlib of a pickled text."""
    if not isinstance(value, str) or not value.strip() or value.lstrip().startswith("["):
        return json_column(value) or []
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(value, validate=True), MAX_UNPACKED)
        return json_column(_OnlyText(io.BytesIO(packed)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"is neither JSON nor packed tests: {error}") from None


MAX_UNPACKED = 1 << 30


class _OnlyText(pickle.Unpickler):
    """Unpickles texts and their like, and nothing that has a class: a row is no program."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"holds {module}.{name}")


class _LiveMetadata(TaskRow):
    func_name: str = ""


class _LiveRow(TaskRow):
    """The columns of LiveCodeBench's code generation that insitu uses."""

    question_id: Text
    question_content: Text
    starter_code: str = ""
    public_test_cases: Annotated[list[_LiveTest], BeforeValidator(_live_tests)] = Field(default_factory=list)
    private_test_cases: Annotated[list[_LiveTest], BeforeValidator(_live_tests)] = Field(default_factory=list)
    metadata: Annotated[_LiveMetadata | None, BeforeValidator(json_column)] = None


class LiveCodeBench(RowFormat):
    """Format `live_code_bench`. The set has no solutions."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _LiveRow.model_validate(row)
        tests = [*parsed.public_test_cases, *parsed.private_test_cases]
        kinds = {test.testtype for test in tests}
        if len(kinds) > 1 or kinds - {"stdin", "functional"}:
            raise TaskError(f"tests of type {', '.join(sorted(kinds))}: stdin or functional are supported")
        function = ""
        if kinds == {"functional"}:
            function = (parsed.metadata or _LiveMetadata()).func_name
            if not function:
                raise TaskError("functional tests need metadata.func_name")
            function = f"Solution.{function}" if "class Solution" in parsed.starter_code else function
        problem = Problem(
            id=parsed.question_id,
            question=parsed.question_content,
            category="live_code_bench",
            function=function,
            starter=parsed.starter_code,
            exchanges=() if function else tuple(Exchange(stdin=t.input, expected=t.output) for t in tests),
            by_line=True,
            tolerance=0.0,
            cases=tuple(_live_call(function, test) for test in tests) if function else (),
        )
        return problem_item(problem, options)


def _live_call(function: str, test: _LiveTest) -> Case:
    """One argument per line, each as JSON."""
    try:
        args = tuple(json.loads(line) for line in test.input.split("\n") if line.strip())
        return Case(function=function, args=args, expected=json.loads(test.output), exact=False, lists=True)
    except ValueError as error:
        raise TaskError(f"a functional test is not JSON: {error}") from None
