"""The grading side as rollout.py sees it: a task and a tree go in, a verdict comes out, the oracle stays."""

from __future__ import annotations

from whet.errors import WhetError
from whet.grade.clean import Grader
from whet.tasks.base import TaskSource
from whet.types import Task, Tree, Verdict


class TaskJudge:
    """Implements whet.rollout.Judge over one task source."""

    def __init__(self, grader: Grader, source: TaskSource) -> None:
        self._grader, self._source = grader, source

    async def __call__(self, task: Task, tree: Tree) -> Verdict:
        verdict = await self._grader.grade(task, self._source.oracle(task), tree)
        return self._source.scored(task, tree, verdict)

    async def base(self, task: Task) -> Tree:
        """What the task starts from. Raises SandboxError."""
        return (await self._grader.bases.of(task)).files

    async def prepare(self, task: Task) -> None:
        """Have ready what grading will need, while the agent works. What fails here is told then."""
        try:
            await self._grader.prepare(task)
        except WhetError:
            return

    async def close(self) -> None:
        await self._grader.close()
