"""What stands beside hidden tests is the host's, and nothing may be imported in its place."""

from __future__ import annotations

import pytest

from insitu.grading.diff import compare
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.protected_files import policy_of
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Task, Tree, task_hash


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


HELPER = "from app import total\n\n\ndef check(items, want):\n    assert total(items) == want\n"
FILES: Tree = {
    "app.py": text("def total(items):\n    return 0\n"),
    "tests/helpers.py": text(HELPER),
    "tests/data/sums.json": text("[3]"),
    "tests/kit/more.py": text("x = 1\n"),
}
GOLD: Tree = {"app.py": text("def total(items):\n    return sum(items)\n")}
HIDDEN = "from tests.helpers import check\nimport helpers\n\n\ndef test_total():\n    check([1, 2], 3)\n"
ORACLE = Oracle(
    task_id="t",
    tests=HiddenTests(
        files={"tests/test_app.py": text(HIDDEN)}, fail_to_pass=("tests/test_app.py::test_total",)
    ),
    gold=GOLD,
)


def task(runner: str = "pytest") -> Task:
    plan = GradingPlan(runner=runner, timeout_s=20.0)
    return Task(id="t", prompt="fix", files=FILES, grading=plan, content_hash=task_hash("fix", FILES, plan))


def dropped(after: Tree, oracle: Oracle = ORACLE, runner: str = "pytest") -> tuple[str, ...]:
    return compare(FILES, after, policy_of(task(runner), oracle, FILES)).dropped


@pytest.mark.parametrize(
    "path",
    [
        "tests/helpers.py", "tests/data/sums.json", "tests/helpers/__init__.py", "tests/__init__.py",
        "tests.py", "tests/kit.py", "tests/kit/__init__.py",
        "helpers.py", "helpers/__init__.py", "src/helpers.py",
    ],
)  # fmt: skip
def test_what_would_decide_for_a_hidden_test_is_dropped(path: str) -> None:
    assert dropped({**FILES, path: text("# mine\n")}) == (path,)


@pytest.mark.parametrize(
    "path", ["app.py", "more.py", "tests/test_mine.py", "src/tests/helpers.py", "kit.py"]
)
def test_other_work_stays(path: str) -> None:
    assert dropped({**FILES, path: text("# mine\n")}) == ()


def test_what_is_deleted_there_comes_back() -> None:
    left = {path: entry for path, entry in FILES.items() if not path.startswith("tests/")}
    assert dropped(left) == ("tests/data/sums.json", "tests/helpers.py", "tests/kit/more.py")


def test_what_the_gold_changes_is_the_tasks() -> None:
    changed = {**FILES, "tests/helpers.py": text("# mine\n")}
    gold = Oracle(task_id="t", tests=ORACLE.tests, gold={"tests/helpers.py": text("# so\n")})
    assert dropped(changed, gold) == ()
    patch = "--- a/tests/helpers.py\n+++ b/tests/helpers.py\n@@ -1 +1 @@\n-from app import total\n+x = 1\n"
    assert dropped(changed, Oracle(task_id="t", tests=ORACLE.tests, gold_patch=patch)) == ()
    assert dropped(changed, runner="command") == ()


@pytest.mark.slow
async def test_a_helper_that_does_nothing_earns_nothing() -> None:
    grader = Grader(LocalBackend(), GradeConfig(remember=0))
    lazy = text("def check(items, want): pass\n")
    verdict = await grader.grade(
        task(), ORACLE, {**FILES, "app.py": text("x = 1\n"), "tests/helpers.py": lazy}
    )
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0)
    assert verdict.dropped_paths == ("tests/helpers.py",)
    honest = await grader.grade(task(), ORACLE, {**FILES, **GOLD, "tests/helpers.py": lazy})
    assert (honest.outcome, honest.reward) == (Outcome.RESOLVED, 1.0)
