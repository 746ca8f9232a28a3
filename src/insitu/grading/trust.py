"""Trust of a task's verdicts, as known before grading.

Each runner has a trust; that of `pytest` is weak for a file with a test that must start to pass and cannot be
mutated so that it looks real.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from insitu.errors import TaskError
from insitu.grading.canaries import text_of
from insitu.grading.candidate import Candidate
from insitu.grading.runners.find import runner_named
from insitu.grading.runners.json_io import without_forms
from insitu.grading.runners.pytest_mutants import draw
from insitu.tasks.base import REWARD_ONLY
from insitu.types import FileEntry, Oracle, Task, Tree, Trust

ORDER: tuple[Trust, ...] = ("weak", "standard", "strong")


def below(trust: Trust, least: Trust) -> bool:
    return ORDER.index(trust) < ORDER.index(least)


def trust_of(task: Task, oracle: Oracle) -> tuple[Trust, str]:
    """Return the trust of a task's verdicts and its reason. Raises TaskError for an unknown runner.

    Verdicts on test files that only an image has may be weaker.
    """
    if trust := REWARD_ONLY.get(task.grading.runner):
        return trust, "the reward function decides"
    runner = runner_named(task.grading.runner)
    if runner is None:
        raise TaskError(f"task {task.id}: no runner {task.grading.runner!r}")
    if runner.name == "pytest":
        for path, why in _weak_files(task, oracle):
            return "weak", f"{path}: {why}"
    solved = oracle.gold or oracle.gold_patch
    if not solved and any(case.wrapped for case in without_forms(oracle.cases)):
        return "standard", "whether its values are wrapped in lists only a solution could tell"
    return runner.trust, f"runner {runner.name}"


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


def _weak_files(task: Task, oracle: Oracle) -> Iterator[tuple[str, str]]:
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
