"""The user's reward function: `reward(rollout: FinishedRollout) -> float | dict | None`.

A number is the reward; a dictionary names its components, whose sum is the reward; None means not graded.
An exception or a timeout is an infrastructure failure, never 0. Tampered and refused rollouts keep the
verdict's reward: no function may change it.

A function with an attribute `environment(row)`, which returns an async context of a ToolEnvironment or None,
gives agents tools beside their own: one session for each attempt, whose rewards reach it as `earned`.
What sessions share may have `gauges()`, figures for the timeline, and `close()`, called when a run ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from insitu.config import Config
from insitu.errors import ConfigError
from insitu.grading.diff import unified
from insitu.registry import find
from insitu.tasks.user_functions import BadResult, UserFunction
from insitu.types import FinishedRollout, Outcome, Rollout, Task, ToolSpec, Tree, Turn

FINAL = (Outcome.INFRA, Outcome.TAMPERED, Outcome.REFUSED)
"""Outcomes whose reward no function may change."""
DIFF_CHARS = 1 << 20
EARNED = "environment"
"""Name of an environment's part of the reward; one returned under this name survives a regrade."""
Transcript = Callable[[Rollout], str]


class ToolEnvironment(Protocol):
    """Session of an environment that the agent of one attempt acts on by tools."""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """Offered to the model beside the agent's own; `env_NAME` where the agent has one of that name."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Take a step; return what the model reads. Raises InsituError when the environment fails."""

    @property
    def earned(self) -> float | None:
        """Sum of the rewards so far, never shown to the agent; None if no step taken had one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """The configured function, with the source of transcripts."""

    function: UserFunction
    transcript: Transcript
    group: bool = False
    opener: Callable[[Mapping[str, Any]], AbstractAsyncContextManager[ToolEnvironment] | None] | None = None
    """The function's `environment`."""
    gauges: Callable[[], Mapping[str, int]] = dict
    close: Callable[[], object] = dict

    async def score(self, finished: FinishedRollout, rollout: Rollout) -> Rollout:
        """Return `rollout` with the function's reward; raise GradeError or FunctionFailed."""
        reward, parts = await self.function.call(lambda function: _parse(function(finished)))
        return replace(rollout, reward=reward, reward_components=parts)

    def finished(
        self, task: Task, rollout: Rollout, base: Tree, row: Mapping[str, Any]
    ) -> FinishedRollout | None:
        """Return the function's argument; None where the verdict's reward is final."""
        if rollout.verdict is None or rollout.verdict.outcome in FINAL:
            return None
        kept = {path: entry for path, entry in base.items() if path not in rollout.deleted}
        files = {**kept, **rollout.changed}
        return FinishedRollout(
            id=rollout.id,
            task=task,
            row=row,
            files=files,
            diff=unified(base, files, max_chars=DIFF_CHARS),
            transcript=self.transcript(rollout),
            turns=rollout.turns,
            status=rollout.status,
            verdict=rollout.verdict,
            earned=rollout.reward_components.get(EARNED),
        )


def reward_function(config: Config, transcript: Transcript) -> RewardFunction | None:
    """Return the configured function, None without one; raise ConfigError if it cannot be loaded."""
    table = config.reward
    if not table.function:
        return None
    found = find("rewards", table.function)
    if not callable(found):
        raise ConfigError(f"reward.function: {table.function} is not a function")
    if getattr(found, "needs_group", False) and not table.group:
        raise ConfigError(f"reward.function: {table.function} needs reward.group = true")
    function = UserFunction(
        f"reward.function {table.function}",
        found,
        max_concurrent=table.max_concurrent,
        timeout_s=table.timeout_s,
    )
    names = {"environment": "opener", "gauges": "gauges", "close": "close"}
    more = {field: getattr(found, name) for name, field in names.items() if hasattr(found, name)}
    return RewardFunction(function=function, transcript=transcript, group=table.group, **more)


def main_line(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns from the root to the last one that counts, in order; of steps one after another."""
    by_index = {turn.index: turn for turn in turns}
    line: list[Turn] = []
    for step in dict.fromkeys(turn.step for turn in turns):
        own = [turn for turn in turns if turn.step == step]
        at: Turn | None = next((turn for turn in reversed(own) if not turn.excluded), own[-1])
        known = {turn.index for turn in line}
        part: list[Turn] = []
        while at is not None and at.index not in known:
            part.append(at)
            at = by_index.get(at.parent)
        line += part[::-1]
    return line


def _parse(value: object) -> tuple[float | None, dict[str, float]]:
    """Return reward and components of a function's result; raise BadResult."""
    if value is None:
        return None, {}
    if not isinstance(value, Mapping):
        return _number(value), {}
    if not value:
        raise BadResult("returned a dictionary without components")
    parts = {str(name): _number(part) for name, part in value.items()}
    return math.fsum(parts.values()), parts


def _number(value: object) -> float:
    # NumPy numbers and 0-d tensors are numbers; float() of a text would be a guess.
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise BadResult(f"returned {value!a}, not a finite number, a dictionary of them or None")
    number = float(value)
    if not math.isfinite(number):
        raise BadResult(f"returned {value!a}, not a finite number, a dictionary of them or None")
    return number
