"""The grading side as an attempt sees it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from insitu.attempt import PreparableJudge
from insitu.grading.grader import Grader
from insitu.grading.judge import TaskJudge
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Split
from insitu.types import (
    Case,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    Setup,
    Task,
    Tree,
    Verdict,
    task_hash,
)

pytestmark = pytest.mark.slow


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


FILES = {"app.py": text("def one():\n    return 0\n")}


class OneOracle:
    """A source that knows one oracle."""

    name = "one"

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def size(self, split: Split) -> int | None:
        return 0

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return []

    def oracle(self, task: Task) -> Oracle:
        return self._oracle

    async def scored(self, task: Task, after: Tree, verdict: Verdict) -> Verdict:
        return verdict


PLAIN = Setup()


def make(plan: GradingPlan, setup: Setup = PLAIN) -> Task:
    name = task_hash("p", FILES, plan, setup)
    return Task(id="t", prompt="p", files=FILES, setup=setup, grading=plan, content_hash=name)


async def test_a_row_that_cannot_be_graded_is_nobodys_fault() -> None:
    tests = HiddenTests(
        script="true", parser="go", fail_to_pass=("A",), patch="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    )
    judge = TaskJudge(Grader(LocalBackend()), OneOracle(Oracle(task_id="t", tests=tests)))
    verdict = await judge(make(GradingPlan(runner="swebench_log")), {"app.py": text("")})
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert verdict.reason == "task t: the hidden tests: the patch does not apply: x does not exist"


async def test_the_base_of_a_plain_task_is_its_files_and_needs_no_sandbox() -> None:
    case = Case(function="one", args=(), expected=1)
    judge = TaskJudge(Grader(LocalBackend()), OneOracle(Oracle(task_id="t", cases=(case,))))
    task = make(GradingPlan(entry="app.py"))
    assert isinstance(judge, PreparableJudge)
    await judge.prepare(task)
    assert await judge.base(task) == FILES
    right = {"app.py": text("def one():\n    return 1\n")}
    assert (await judge(task, right)).outcome is Outcome.RESOLVED
    broken = make(GradingPlan(entry="app.py"), Setup(commands=("exit 1",)))
    await judge.prepare(broken)
    assert (await judge(broken, right)).outcome is Outcome.INFRA
    await judge.close()
