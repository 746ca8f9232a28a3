"""The files that stand beside hidden tests: what these import or read is the host's, as the tests are.

A hidden test that takes its expectation from tests/util.py is worth what tests/util.py is. So of the folder
`tests` or `test` that hidden test files lie in, the base's own files are put back, and a new file that would
be imported in the place of one is dropped. What the gold changes there is the task's, and stays the agent's.
Pure. Only for runners of unit tests; what a command or a script of the task's author reads `protected` names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from insitu.grading.candidate import Candidate, restored
from insitu.grading.diff import DiffPolicy
from insitu.tasks.patch import patched_paths
from insitu.types import FileEntry, Oracle, Task, Tree

RUNNERS = frozenset({"pytest", "swebench_log"})
FOLDERS = frozenset({"tests", "test"})
SOURCES = ("", "src/")
"""Where the runner `pytest` looks for a module before the folder of the test file."""


def policy_of(task: Task, oracle: Oracle, base: Tree) -> DiffPolicy:
    """What a diff of `task` may contain. Raises TaskError for a patch that does not fit the base."""
    plain = DiffPolicy(protected=task.grading.protected)
    if task.grading.runner not in RUNNERS:
        return plain
    hidden = _hidden(task, oracle, base)
    roots = {root for path in hidden for root in _root(path)}
    if not roots:
        return plain
    gold = {*oracle.gold, *(patched_paths(oracle.gold_patch) if oracle.gold_patch else ())}
    kept = frozenset(path for path in base if _inside(path, roots) and path not in gold)
    shadows = {*_beside(kept, roots), *_before(hidden, kept, base)} - gold
    return DiffPolicy(
        protected=task.grading.protected,
        put_back=kept,
        shadows=frozenset(path for path in shadows if path not in base),
    )


def _hidden(task: Task, oracle: Oracle, base: Tree) -> Tree:
    tests = oracle.tests
    named = {name.partition("::")[0] for name in (*tests.fail_to_pass, *tests.pass_to_pass) if "::" in name}
    return {**restored(base, sorted(named)), **Candidate.of(task, base, base).hidden(tests)}


def _root(path: str) -> Iterator[str]:
    """The outermost folder of tests that a file lies in, if there is one."""
    folders = path.split("/")[:-1]
    for depth, name in enumerate(folders, 1):
        if name in FOLDERS:
            yield "/".join(folders[:depth])
            return


def _inside(path: str, roots: set[str]) -> bool:
    return any(path.startswith(root + "/") for root in roots)


def _beside(kept: frozenset[str], roots: set[str]) -> Iterator[str]:
    """What would be imported in the place of a kept module, or of a package that a kept file lies in."""
    for path in kept:
        if path.endswith(".py"):
            yield path.removesuffix(".py")  # a folder wins over a module
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder in roots or _inside(folder, roots):
                yield f"{folder}.py"
                yield f"{folder}/__init__.py"


def _before(hidden: Tree, kept: frozenset[str], base: Tree) -> Iterator[str]:
    """What would be found before the module beside a test file that it imports by its bare name."""
    for path, entry in hidden.items():
        folder = path.rpartition("/")[0]
        for name in _imported(entry) if path.endswith(".py") else ():
            if f"{folder}/{name}.py" not in kept and f"{folder}/{name}/__init__.py" not in kept:
                continue
            ways = [f"{source}{name}" for source in SOURCES]
            if not any(f"{way}.py" in base or f"{way}/__init__.py" in base for way in ways):
                yield from (way + end for way in ways for end in (".py", ""))


def _imported(entry: FileEntry) -> set[str]:
    """First names of the absolute imports of a test file; none where it is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(entry.content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names if name}
