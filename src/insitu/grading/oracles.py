"""Facts about an oracle: its solution, its number of checks, its digest."""

from __future__ import annotations

import hashlib
import marshal

from insitu.errors import TaskError
from insitu.tasks.patch import apply_patch
from insitu.types import Case, Oracle, Task, Tree


def solution(task: Task, oracle: Oracle, base: Tree) -> Tree:
    """Return `base` with the gold change. Raises TaskError when its patch does not apply."""
    if oracle.gold_patch:
        try:
            return apply_patch({**base, **oracle.gold}, oracle.gold_patch, reverse=oracle.gold_reversed)
        except TaskError as error:
            raise TaskError(f"task {task.id}: the gold change: {error}") from None
    return {**base, **oracle.gold}


def total_of(oracle: Oracle) -> int:
    tests = oracle.tests
    required = len(tests.fail_to_pass) + len(tests.pass_to_pass)
    return len(oracle.cases) + len(oracle.exchanges) + len(tests.checks) + (required or len(tests.expected))


def oracle_digest(oracle: Oracle) -> str:
    """Return the cache key of an oracle."""
    tests = oracle.tests
    files = {path: (entry.executable, entry.content) for path, entry in tests.files.items()}
    strong = (
        [_case_key(case) for case in oracle.cases],
        oracle.exchanges,
        oracle.checker,
        oracle.by_line,
        oracle.tolerance,
    )
    whole = (strong, tests, sorted(files.items()), tests.patch, tests.script)
    return hashlib.sha256(ascii(whole).encode()).hexdigest()


def _case_key(case: Case) -> bytes | str:
    """Return a case as bytes: its text would take time where integers are long."""
    parts = (case.function, case.args, case.expected, case.exact, case.tolerance, case.wrapped, case.lists)
    try:
        return marshal.dumps(parts, 0)  # type: ignore[arg-type]
    except ValueError:  # an odd value
        return ascii(case)
