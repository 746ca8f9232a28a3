"""Results of an attempt: verdict, rollout, group."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from insitu.types.arms import arm_of
from insitu.types.capture import Trajectory, Turn
from insitu.types.generation import BoolArray, FloatArray, IntArray
from insitu.types.tasks import Task, Tree
from insitu.types.values import Value


class Outcome(enum.StrEnum):
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    TAMPERED = "tampered"
    REFUSED = "refused"
    TEST_TIMEOUT = "test_timeout"
    INFRA = "infra"


Trust = Literal["strong", "standard", "weak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingCheck(Value):
    """One required check that did not pass: for the operator, never for the agent or an export."""

    name: str
    outcome: str
    """What happened instead: `wrong`, `failed`, `missing`, the name of an error."""
    expected: str = ""
    got: str = ""
    tail: str = ""
    """End of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Value):
    """Result of grading; `reward` is None exactly when outcome is INFRA."""

    outcome: Outcome
    reward: float | None
    trust: Trust
    passed: int = 0
    total: int = 0
    """Required checks: cases, tests or commands."""
    fail_to_pass: tuple[int, int] = (0, 0)
    """(passed, required), where tests are reported separately."""
    pass_to_pass: tuple[int, int] = (0, 0)
    controls: str = ""
    """Result of the must-fail and must-pass controls of the run; empty if the runner has none."""
    image: str = ""
    """Image of the grading sandbox, with its digest; empty = the plain sandbox."""
    grader: str = ""
    """Version of the grading code."""
    dropped_paths: tuple[str, ...] = ()
    """Protected paths the agent changed; the change was dropped."""
    reason: str = ""
    task_hash: str = ""
    diff_hash: str = ""
    duration_s: float = 0.0
    evidence: tuple[FailingCheck, ...] | None = field(default=None, repr=False)
    """First failing checks; None = not recorded."""


class Status(enum.StrEnum):
    """How an attempt ended; only INFRA_FAILED has no reward."""

    OK = "ok"
    TRUNCATED = "truncated"
    AGENT_FAILED = "agent_failed"
    INFRA_FAILED = "infra_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings(Value):
    """Seconds of one attempt by phase; always filled, also on failure."""

    queued_s: float = 0.0
    agent_s: float = 0.0
    engine_s: float = 0.0
    grade_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Value):
    """Training rows of one rollout, concatenated; arrays of one length n, read-only inputs copied."""

    ids: IntArray = field(repr=False)
    """Token ids, int32 [n]."""
    mask: BoolArray = field(repr=False)
    """Whether the token was sampled and may be trained, bool [n]."""
    logprobs: FloatArray = field(repr=False)
    """Sampler's log-probability where `mask` is set, else 0; float32 [n]."""
    versions: IntArray = field(repr=False)
    """Policy version that sampled the token where `mask` is set, else 0; int32 [n]."""
    segment: IntArray = field(repr=False)
    """Index of the training row the token belongs to, int32 [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Value):
    """Final result of one slot of a group."""

    id: str
    """Unique within a run and the same after resume: phase/step/group/slot."""
    task_id: str
    category: str
    status: Status
    reward: float | None
    """None = not graded: an infrastructure failure, or a reward function that returned None."""
    trajectory: Trajectory
    verdict: Verdict | None
    changed: Tree
    """Files that the agent added or changed (text diffs are derived from it and the task)."""
    deleted: tuple[str, ...]
    timings: Timings
    attempt: int = 1
    error: str = ""
    """One line, for INFRA_FAILED and AGENT_FAILED."""
    egress_attempts: int | None = None
    """Blocked network connections of the agent's sandbox, counted by its kernel; None = unknown."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, if the reward function returned a dictionary."""
    began_s: float | None = None
    """When the attempt was queued, in seconds since the epoch."""
    diff: str | None = field(default=None, repr=False)
    """The judged changes as a bounded unified diff, binary files only named; None = not recorded."""
    part: str = ""
    """`Task.part` of its task."""

    @property
    def task_set(self) -> str:
        """Name of the task set that its task is of; empty where the run has one without a name."""
        return arm_of(self.part).task_set

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Completed model calls in order."""
        return self.trajectory.turns

    def tokens(self) -> Tokens:
        """Return the training rows of the rollout, concatenated."""
        segments = self.trajectory.segments
        lengths = [len(segment.ids) for segment in segments]
        return Tokens(
            ids=_joined([s.ids for s in segments], np.int32),
            mask=_joined([s.mask for s in segments], np.bool_),
            logprobs=_joined([s.logprobs for s in segments], np.float32),
            versions=_joined([s.versions for s in segments], np.int32),
            segment=np.repeat(np.arange(len(segments), dtype=np.int32), lengths),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout(Value):
    """Argument of a reward function: one graded attempt with its files and text."""

    id: str
    task: Task
    row: Mapping[str, Any] = field(repr=False)
    """Row of the data set that the task was made from; empty if it comes from no row."""
    files: Tree = field(repr=False)
    """Work folder after the agent, without ignored files."""
    diff: str = field(repr=False)
    """Unified diff of the work folder; binary files are named only."""
    transcript: str = field(repr=False)
    """Text of the main line of model calls, with the chat template's markers."""
    turns: tuple[Turn, ...] = field(repr=False)
    """All model calls; empty with engine.kind upstream."""
    status: Status
    verdict: Verdict
    earned: float | None = None
    """Sum of the rewards of the environment that the agent acted on by tools; None without any."""
    group: tuple[FinishedRollout, ...] = field(default=(), repr=False)
    """All graded rollouts of the group, this one included; only with `reward.group`."""


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


SAME = 1e-9
"""Relative tolerance below which rewards are equal: sums of floats differ in the last bits."""


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal; True for fewer than two."""
    if len(rewards) < 2:
        return True
    return max(rewards) - min(rewards) <= SAME * max(map(abs, rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Value):
    """Rollouts of one task that share a baseline."""

    id: str
    task_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> Sequence[float]:
        """Rewards of the scorable rollouts only."""
        return [r.reward for r in self.rollouts if r.reward is not None]

    @property
    def degenerate(self) -> bool:
        """True when all scorable rewards are equal: the group has no gradient."""
        return equal_rewards(self.rewards)
