"""The verdicts of a task's steps in order, whether the next step starts, and what they make of the reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from insitu.grading.reward import FINAL
from insitu.grading.verdict import MAX_REASON_CHARS
from insitu.types import Outcome, Task, Verdict

TRUSTS = ("weak", "standard", "strong")


class StepGrades:
    """Made for one attempt.

    A step that was not reached counts as 0.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._found: list[Verdict] = []
        self._low = ""

    def add(self, verdict: Verdict) -> bool:
        """Take the verdict of the next step; return whether another one follows."""
        step = self._task.steps[len(self._found)]
        self._found.append(verdict)
        if verdict.reward is None:
            return False
        if step.min_reward is not None and verdict.reward < step.min_reward:
            self._low = f"{step.name} is below its min_reward {step.min_reward:g}"
            return False
        return len(self._found) < len(self._task.steps)

    @property
    def parts(self) -> Mapping[str, float]:
        """Rewards by the names of all steps."""
        rewards = [verdict.reward or 0.0 for verdict in self._found]
        rewards += [0.0] * (len(self._task.steps) - len(rewards))
        return {step.name: reward for step, reward in zip(self._task.steps, rewards, strict=True)}

    @property
    def verdict(self) -> Verdict:
        """Verdict on the whole task; that of a step without a reward is its own."""
        last, steps = self._found[-1], self._task.steps
        if last.reward is None:
            reason = f"step {steps[len(self._found) - 1].name}: {last.reason}"[:MAX_REASON_CHARS]
            return replace(last, reason=reason, task_hash=self._task.content_hash)
        parts = list(self.parts.values())
        reward = parts[-1] if self._task.grading.steps == "final" else math.fsum(parts) / len(parts)
        outcome = self._outcome(reward)
        if outcome in FINAL:
            reward = 0.0  # as in a task of one step
        named = list(zip(steps, self._found, strict=False))
        return replace(
            last,
            outcome=outcome,
            reward=reward,
            trust=min((found.trust for found in self._found), key=TRUSTS.index),
            passed=sum(found.outcome is Outcome.RESOLVED for found in self._found),
            total=len(steps),
            dropped_paths=tuple(dict.fromkeys(path for found in self._found for path in found.dropped_paths)),
            reason=self._reason(),
            task_hash=self._task.content_hash,
            duration_s=math.fsum(found.duration_s for found in self._found),
            evidence=tuple(
                replace(check, name=f"{step.name}: {check.name}")
                for step, found in named
                for check in found.evidence or ()
            ),
        )

    def _outcome(self, reward: float) -> Outcome:
        """Return that of the first step that was not resolved; one that was refused comes first."""
        other = [found.outcome for found in self._found if found.outcome is not Outcome.RESOLVED]
        if grave := [outcome for outcome in other if outcome in FINAL]:
            return grave[0]
        through = len(self._found) == len(self._task.steps)
        return Outcome.RESOLVED if through and reward == 1.0 else [*other, Outcome.UNRESOLVED][0]

    def _reason(self) -> str:
        said = [f"{name} {reward:g}" for name, reward in self.parts.items()]
        steps = zip(self._task.steps, self._found, strict=False)
        why = [
            f"{step.name}: {found.reason}" for step, found in steps if found.outcome is not Outcome.RESOLVED
        ]
        if not self._low and len(self._found) < len(self._task.steps):
            why.append(f"{self._task.steps[len(self._found)].name} could not start")
        return "; ".join([", ".join(said), *([self._low] if self._low else []), *why])[:MAX_REASON_CHARS]
