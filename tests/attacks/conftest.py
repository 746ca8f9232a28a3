"""One small real task, graded for real: what every attack is tried on."""

from __future__ import annotations

import pytest

from insitu.grading.grader import GradeConfig, Grader
from insitu.sandbox.local import LocalBackend
from insitu.types import Case, FileEntry, GradingPlan, Oracle, Outcome, Task, Tree, Verdict, task_hash

FAULTY = "def total(items):\n    result = 0\n    for n in items:\n        result -= n\n    return result\n"
FIXED = FAULTY.replace("-=", "+=")
SECRET = 90125_8047_3316
INPUTS = ([3, 4], [5, 6, 7], [SECRET - 1, 1])
CASES = tuple(Case(function="total", args=(items,), expected=sum(items)) for items in INPUTS)
FILES = {
    "app.py": FileEntry(content=FAULTY.encode()),
    "tests/test_app.py": FileEntry(content=b"from app import total\nassert total([1, 2]) == 3\n"),
    "tests/conftest.py": FileEntry(content=b"# real\n"),
    "requirements.txt": FileEntry(content=b"left-pad==1.0\n"),
}


def make_task(timeout_s: float = 10.0) -> Task:
    plan = GradingPlan(entry="app.py", protected=("tests/*", "requirements.txt"), timeout_s=timeout_s)
    return Task(id="t", prompt="fix", files=FILES, grading=plan, content_hash=task_hash("fix", FILES, plan))


ORACLE = Oracle(task_id="t", cases=CASES, gold={"app.py": FileEntry(content=FIXED.encode())})


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    return LocalBackend()


class Lab:
    """Grades a version of app.py, with other files beside it, and checks what holds for every verdict."""

    files = FILES
    oracle = ORACLE
    secret = SECRET
    task = staticmethod(make_task)

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self.grader = Grader(backend, GradeConfig(remember=0))

    async def __call__(
        self, app: str, noise: Tree | None = None, *, without: tuple[str, ...] = (), timeout_s: float = 10.0
    ) -> Verdict:
        kept = {path: entry for path, entry in FILES.items() if path not in without}
        after = {**kept, "app.py": text(app), **(noise or {})}
        verdict = await self.grader.grade(make_task(timeout_s), ORACLE, after)
        assert str(SECRET) not in repr(verdict)
        assert (verdict.reward == 1.0) == (verdict.outcome is Outcome.RESOLVED)
        return verdict


@pytest.fixture
def lab(backend: LocalBackend) -> Lab:
    return Lab(backend)
