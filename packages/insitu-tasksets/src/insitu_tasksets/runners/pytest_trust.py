"""Which test files have weak verdicts, as known before grading.

Those with a test that must start to pass and cannot be mutated so that it looks real.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from insitu.grading.candidate import Candidate
from insitu.types import FileEntry, Oracle, Task, Tree
from insitu_tasksets.runners.canaries import text_of
from insitu_tasksets.runners.pytest_mutants import draw


def _tests_of(entry: FileEntry | None) -> list[str]:
    """Return `test` and `Class::test` of a test file."""
    try:
        body = ast.parse(entry.content).body if entry is not None else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    owners = [("", body)] + [(f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef)]
    return [
        prefix + node.name
        for prefix, nodes in owners
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    ]


def _named(name: str, known: Tree) -> list[str]:
    """Return the ids of a required name: itself, or the tests of a whole file."""
    return [name] if "::" in name else [f"{name}::{test}" for test in _tests_of(known.get(name))]


def weak_files(task: Task, oracle: Oracle) -> Iterator[tuple[str, str]]:
    """Yield the test files whose verdicts are weak, each with the reason."""
    tests = oracle.tests
    known = dict(task.files)
    if task.files or not tests.patch:
        known |= Candidate.of(task, task.files, task.files).hidden(tests)
    new, old = (
        [one for name in names for one in _named(name, known)]
        for names in (tests.fail_to_pass, tests.pass_to_pass)
    )
    for path in dict.fromkeys(name.partition("::")[0] for name in (*new, *old)):
        if path in known:
            names = [name for name in (*new, *old) if name.startswith(path + "::")]
            try:
                text = text_of(known[path].content)
            except ValueError:
                continue  # not Python: the grader reports it
            if why := draw(path, text, new, names, random.Random(path), seed=path).weak:
                yield path, why
