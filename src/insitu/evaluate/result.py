"""What an evaluation found: the graded rollouts of each task, in all and of each task set and agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from insitu.storage.pass_at_k import TaskCounts
from insitu.storage.score import Score
from insitu.storage.summaries import RolloutSummary
from insitu.types import ArmName, Rollout, arm_of

R = TypeVar("R", Rollout, RolloutSummary)
Groups = Mapping[int, Sequence[R]]
"""Rollouts by the number of their group, which is that of their task."""
Further = Callable[[Sequence[R]], Mapping[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Graded rollouts of one evaluation at one moment."""

    score: Score
    samples: int
    tasks: Mapping[int, TaskCounts]
    """By group, in order of the tasks."""
    further: Mapping[str, float | None] = field(default_factory=dict)
    sets: Mapping[str, EvalResult] = field(default_factory=dict)
    """Of each named task set and each of several agents alone, by `ArmName.label`."""

    @classmethod
    def of(cls, groups: Groups[R], samples: int, further: Further[R] = lambda rollouts: {}) -> EvalResult:
        """Return the result of these rollouts; `further`: what else is measured of them and of each set."""

        def whole(own: Groups[R]) -> EvalResult:
            rewards = {n: [r.reward for r in one if r.reward is not None] for n, one in own.items()}
            tasks = {number: TaskCounts.of(found) for number, found in rewards.items()}
            more = further([rollout for one in own.values() for rollout in one])
            return cls(score=Score.of_tasks(tasks.values()), samples=samples, tasks=tasks, further=more)

        return replace(whole(groups), sets={name: whole(own) for name, own in by_set(groups).items()})


def by_set(groups: Groups[R]) -> dict[str, Groups[R]]:
    """Return the rollouts of each named task set, and those of each of several agents."""

    def among(name: str, of: Callable[[ArmName], str]) -> Groups[R]:
        chosen = {number: [r for r in own if of(arm_of(r.part)) == name] for number, own in groups.items()}
        return {number: own for number, own in chosen.items() if own}

    arms = [arm_of(part) for part in sorted({rollout.part for own in groups.values() for rollout in own})]
    sets = sorted({arm.task_set for arm in arms} - {""})
    found = {name: among(name, lambda arm: arm.task_set) for name in sets}
    return found | {arm.label: among(arm.part, lambda one: one.part) for arm in arms if arm.agent}
