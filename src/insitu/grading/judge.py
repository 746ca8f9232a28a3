"""The grading side of an attempt: verdict of a tree, and reward of a rollout. The oracle stays inside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from insitu.backoff import backoff_s
from insitu.concurrency import run_all
from insitu.errors import FunctionFailed, GradeError, InsituError, TaskError, user_code
from insitu.grading.grader import Grader
from insitu.grading.reward import RewardFunction, ToolEnvironment
from insitu.grading.trust import below
from insitu.grading.verdict import MAX_REASON_CHARS
from insitu.sandbox.base import Sandbox
from insitu.tasks.base import REWARD_ONLY, TaskSource
from insitu.types import FinishedRollout, Oracle, Outcome, Rollout, Task, Tree, Trust, Verdict

log = logging.getLogger(__name__)

OPEN_S = 300.0
"""Timeout of opening an environment."""
GROUP_CALLS, GROUP_PAUSE_S = 3, 0.5
"""Calls of a group's reward function for one rollout, and the pause before the second."""


class TaskJudge:
    """Judge over one task source; implements insitu.attempt.Judge."""

    def __init__(
        self,
        grader: Grader,
        source: TaskSource,
        min_trust: Trust = "weak",
        reward: RewardFunction | None = None,
    ) -> None:
        """Create a judge; a verdict below `min_trust` is not graded, `reward` None = the verdict's own."""
        self._grader, self._source, self._min_trust, self._reward = grader, source, min_trust, reward

    async def __call__(self, task: Task, tree: Tree) -> Verdict:
        """Return the verdict; INFRA without a reward for a task that cannot be graded.

        Raises FunctionFailed when a user's function failed several times in a row.
        """
        if task.grading.runner in REWARD_ONLY:
            return Verdict(
                outcome=Outcome.UNRESOLVED,
                reward=0.0,
                trust=REWARD_ONLY[task.grading.runner],
                reason="no hidden tests: the reward function decides",
                task_hash=task.content_hash,
            )
        return await self._checked(task, partial(self._grader.grade, after=tree))

    async def step(self, task: Task, number: int, tree: Tree) -> Verdict:
        """Return the verdict on the files after one of the task's steps, counted from 0; see `__call__`."""
        own = task.steps[number].task

        async def grade(task: Task, oracle: Oracle) -> Verdict:
            return await self._grader.grade(own, oracle.steps[number], tree)

        return await self._checked(task, grade)

    async def live(self, task: Task, sandbox: Sandbox) -> Verdict:
        """Return the verdict of a task that is graded in its agent's sandbox; see `__call__`."""
        return await self._checked(task, partial(self._grader.grade_live, sandbox=sandbox))

    async def _checked(self, task: Task, grade: Callable[[Task, Oracle], Awaitable[Verdict]]) -> Verdict:
        oracle = self._source.oracle(task)
        try:
            verdict = await grade(task, oracle)
            if verdict.outcome is not Outcome.INFRA and below(verdict.trust, self._min_trust):
                raise TaskError(f"grade.min_trust = {self._min_trust}: the verdict is {verdict.trust}")
        except FunctionFailed:
            raise
        except TaskError as error:
            # Not a reason to end a run: no agent can cause it, and other tasks can be graded.
            log.warning("ungraded task=%s reason=%s", task.id, error)
            return Verdict(
                outcome=Outcome.INFRA,
                reward=None,
                trust="weak",
                reason=str(error)[:MAX_REASON_CHARS],
                task_hash=task.content_hash,
            )
        return verdict

    @property
    def scores_groups(self) -> bool:
        """Whether the reward function needs the whole group."""
        return self._reward is not None and self._reward.group

    async def score(self, task: Task, rollout: Rollout) -> Rollout:
        """Return a graded rollout with its reward; None until `score_group` if the function needs the group.

        Raises GradeError when the reward function fails.
        """
        if self._reward is None:
            return rollout
        if self._reward.group:
            return replace(rollout, reward=None)
        return (await self._score(task, [rollout], self._reward))[0]

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Return the graded rollouts of a group with the rewards of a function that needs the group."""
        if self._reward is None or not self._reward.group:
            return rollouts
        return await self._score(task, rollouts, self._reward)

    async def _score(
        self, task: Task, rollouts: Sequence[Rollout], reward: RewardFunction
    ) -> Sequence[Rollout]:
        base, row = await self.base(task), self._source.row(task)
        finished = [
            await asyncio.to_thread(reward.finished, task, rollout, base, row) for rollout in rollouts
        ]
        group = tuple(one for one in finished if one is not None) if reward.group else ()
        return await run_all(
            *(
                _member(reward, one and replace(one, group=group), rollout)
                for one, rollout in zip(finished, rollouts, strict=True)
            )
        )

    async def base(self, task: Task) -> Tree:
        """Return the task's files, those of all its steps; raise SandboxError."""
        last = task.steps[-1].task if task.steps else task
        return (await self._grader.bases.of(last)).files

    @asynccontextmanager
    async def environment(self, task: Task) -> AsyncIterator[ToolEnvironment | None]:
        """Open what the agent of an attempt acts on by tools, if the reward function has it.

        Raises GradeError.
        """
        open_ = None if self._reward is None else self._reward.opener
        if open_ is None:
            yield None
            return
        async with AsyncExitStack() as stack:
            try:
                # of the opening alone: what the attempt raises is no error of the environment's
                with user_code(GradeError, "the environment"):
                    async with asyncio.timeout(OPEN_S):
                        opened = open_(self._source.row(task))
                        environment = await stack.enter_async_context(opened) if opened else None
            except TimeoutError as error:
                raise GradeError(f"the environment did not open within {OPEN_S:g} s") from error
            yield environment

    def gauges(self) -> Mapping[str, int]:
        """Return the reward function's figures for the timeline."""
        return {} if self._reward is None else self._reward.gauges()

    async def prepare(self, task: Task) -> None:
        """Prepare what grading needs while the agent works; grading itself reports a failure."""
        try:
            await self._grader.prepare(task)
        except InsituError:
            return

    async def close(self) -> None:
        """Close the grader and stop the reward function."""
        if self._reward is not None:
            self._reward.function.close()
            await asyncio.to_thread(self._reward.close)
        await self._grader.close()


async def _member(reward: RewardFunction, finished: FinishedRollout | None, rollout: Rollout) -> Rollout:
    """Score one rollout; in a group, whose attempts are over, a failed call is repeated."""
    if finished is None:
        final = rollout.verdict.reward if rollout.verdict else None
        return replace(rollout, reward=final, reward_components={})
    error_before = rollout.error
    for failures in range(1, GROUP_CALLS + 1):
        try:
            return await reward.score(finished, replace(rollout, error=error_before))
        except GradeError as error:
            if not reward.group:
                raise
            log.warning("ungraded rollout=%s call=%d reason=%s", rollout.id, failures, error)
            rollout = replace(rollout, reward=None, error=str(error)[:MAX_REASON_CHARS])
        if failures < GROUP_CALLS:
            await asyncio.sleep(backoff_s(failures, GROUP_PAUSE_S))
    return rollout
