"""Protection of the files beside hidden tests.

A hidden test may import or read helpers such as tests/util.py. So in the folder `tests` or `test` of hidden
test files the base's own files are restored, and a new file that would shadow one is dropped, except for
files that the gold changes. Only for runners of unit tests; for scripts the task lists `protected` files.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from insitu.grading.candidate import Candidate, restored
from insitu.grading.diff import DiffPolicy
from insitu.tasks.patch import patched_paths
from insitu.types import FileEntry, Oracle, Task, Tree

RUNNERS = frozenset({"pytest", "swebench_log"})
FOLDERS = frozenset({"tests", "test"})
SOURCES = ("", "src/")
"""Import roots that precede the folder of the test file."""


def policy_of(task: Task, oracle: Oracle, base: Tree) -> DiffPolicy:
    """Return the policy for diffs of a task. Raises TaskError for a patch that does not fit the base."""
    plain = DiffPolicy(protected=task.grading.protected, roots=task.setup.roots)
    if task.grading.runner not in RUNNERS:
        return plain
    hidden = _hidden(task, oracle, base)
    roots = {root for path in hidden for root in _root(path)}
    if not roots:
        return plain
    gold = {*oracle.gold, *(patched_paths(oracle.gold_patch) if oracle.gold_patch else ())}
    kept = frozenset(path for path in base if _inside(path, roots) and path not in gold)
    shadows = {*_beside(kept, roots), *_before(hidden, kept, base)} - gold
    return replace(
        plain,
        restored_paths=kept,
        shadows=frozenset(path for path in shadows if path not in base),
    )


def _hidden(task: Task, oracle: Oracle, base: Tree) -> Tree:
    tests = oracle.tests
    named = {name.partition("::")[0] for name in (*tests.fail_to_pass, *tests.pass_to_pass) if "::" in name}
    return {**restored(base, sorted(named)), **Candidate.of(task, base, base).hidden(tests)}


def _root(path: str) -> Iterator[str]:
    """Yield the outermost parent folder named `tests` or `test`, if any."""
    folders = path.split("/")[:-1]
    for depth, name in enumerate(folders, 1):
        if name in FOLDERS:
            yield "/".join(folders[:depth])
            return


def _inside(path: str, roots: set[str]) -> bool:
    return any(path.startswith(root + "/") for root in roots)


def _beside(kept: frozenset[str], roots: set[str]) -> Iterator[str]:
    """Yield paths that would shadow a kept module, or a package of a kept file."""
    for path in kept:
        if path.endswith(".py"):
            yield path.removesuffix(".py")  # a package takes precedence over a module
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder in roots or _inside(folder, roots):
                yield f"{folder}.py"
                yield f"{folder}/__init__.py"


def _before(hidden: Tree, kept: frozenset[str], base: Tree) -> Iterator[str]:
    """Yield paths that would shadow a module beside a test file that it imports by its bare name."""
    beside = defaultdict(set)
    for path in kept:
        module = path.removesuffix("/__init__.py").removesuffix(".py")
        if path.endswith(".py") and "/" in module:
            folder, _, name = module.rpartition("/")
            beside[folder].add(name)
    for path, entry in hidden.items():
        # Most files do not contain such a name, and parsing is slow.
        names = {name for name in beside[path.rpartition("/")[0]] if name.encode() in entry.content}
        for name in names & _imported(entry) if names and path.endswith(".py") else ():
            ways = [f"{source}{name}" for source in SOURCES]
            if not any(f"{way}.py" in base or f"{way}/__init__.py" in base for way in ways):
                yield from (way + end for way in ways for end in (".py", ""))


def _imported(entry: FileEntry) -> set[str]:
    """Return the top-level names of absolute imports; none for a file that is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(entry.content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names if name}
