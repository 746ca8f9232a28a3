"""The grading side as attempt.py sees it: a task and a tree go in, a verdict comes out, the oracle stays."""

from __future__ import annotations

import logging

from insitu.errors import InsituError, TaskError
from insitu.grading.grader import Grader
from insitu.grading.trust import below
from insitu.grading.verdict import MAX_REASON_CHARS
from insitu.tasks.base import TaskSource
from insitu.tasks.user_functions import FunctionFailed
from insitu.types import Outcome, Task, Tree, Trust, Verdict

log = logging.getLogger(__name__)


class TaskJudge:
    """Implements insitu.attempt.Judge over one task source."""

    def __init__(self, grader: Grader, source: TaskSource, least: Trust = "weak") -> None:
        """`least`: the strength below which a verdict is none."""
        self._grader, self._source, self._least = grader, source, least

    async def __call__(self, task: Task, tree: Tree) -> Verdict:
        """A row that cannot be graded earns nothing and costs nothing: it is no reason to end a run, and no
        agent can make one. A function of the user's that fails again and again is: raises FunctionFailed."""
        oracle = self._source.oracle(task)
        try:
            verdict = await self._grader.grade(task, oracle, tree)
            if verdict.outcome is not Outcome.INFRA and below(verdict.trust, self._least):
                raise TaskError(f"grade.min_trust = {self._least}: the verdict is {verdict.trust}")
        except FunctionFailed:
            raise
        except TaskError as error:
            log.warning("ungraded task=%s reason=%s", task.id, error)
            return Verdict(
                outcome=Outcome.INFRA,
                reward=None,
                trust="weak",
                reason=str(error)[:MAX_REASON_CHARS],
                task_hash=task.content_hash,
            )
        return await self._source.scored(task, tree, verdict)

    async def base(self, task: Task) -> Tree:
        """What the task starts from. Raises SandboxError."""
        return (await self._grader.bases.of(task)).files

    async def prepare(self, task: Task) -> None:
        """Have ready what grading will need, while the agent works. What fails here is told then."""
        try:
            await self._grader.prepare(task)
        except InsituError:
            return

    async def close(self) -> None:
        await self._grader.close()
