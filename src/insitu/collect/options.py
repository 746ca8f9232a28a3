"""Options of the collector, and protocols of its collaborators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from insitu.attempt import AttemptSpec, OnStart, ignore_cancelled, no_wait
from insitu.config import Config
from insitu.config.base import Count
from insitu.config.training import CollectKeys
from insitu.types import Group, Rollout, Task

Phase = str
"""See storage.phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Position of a rollout in a run."""

    phase: Phase
    step: int
    group: int
    slot: int

    @property
    def rollout_id(self) -> str:
        """Id that sorts in time order and survives a resume: random streams and minted ids depend on it."""
        return f"{self.phase}/{self.step:05d}/{self.group:03d}/{self.slot:02d}"


class Sink(Protocol):
    """Storage for everything that is planned; when a call returns it survives the end of this process."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """Record a draw: its rollouts exist from now on. Repeated after a resume by `open_groups`."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """Record that an attempt has got its worker."""

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def rescored(self, rollout: Rollout) -> None:
        """Replace the reward of a stored rollout, whose group has been scored as a whole."""

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        """Record a failed attempt; if it was the last, the rollout arrives by `put` too."""

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None:
        """Record a cancelled attempt; `rollout` contains the tokens sampled so far.

        `reason`: its group is stale, it missed its deadline, or the run ended before it (unused). If it was
        the last attempt, the rollout arrives by `discard` too.
        """

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        """Record why rollouts are not trained: stale, degenerate, truncated, deadline or infra."""


class ResumableSink(Sink, Protocol):
    """Sink that returns what earlier processes stored of a phase."""

    def held(self, phase: Phase, step: int) -> Iterable[Rollout]:
        """Return the rollouts already decided for a step.

        A rollout that only failed because of the infrastructure is left out while it can be retried.
        """

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        """Return the number of the last known attempt by rollout id, for a step."""


class RolloutObserver(Protocol):
    """Observer of rollouts (the view); must not raise and must not block."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


@runtime_checkable
class GroupScorer(Protocol):
    """A runner of attempts whose rewards may need the whole group."""

    @property
    def scores_groups(self) -> bool: ...

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Return the rollouts with their rewards; raise FunctionFailed if the function keeps failing."""


class AttemptRunner(Protocol):
    """Runs one attempt: `attempt.AttemptExecutor`, or a fake."""

    async def run(
        self,
        spec: AttemptSpec,
        on_start: OnStart,
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        """Run one attempt.

        `ready` is awaited when a worker is available; nothing is awaited between it and `on_start`, which
        gets the engine downtime where that is known. `on_cancelled` is called with the partial rollout when
        the coroutine was cancelled and everything that ran for the attempt has ended.
        """


Check = Callable[[], Awaitable[None]]
"""Called after a failed attempt; raises when no attempt can succeed any more."""


async def nothing_to_check() -> None:
    """No-op check."""


class CollectOptions(CollectKeys):
    """Options of the collector; the keys of [collect] and where its groups belong."""

    seed: int
    group_size: Count = 8
    group_min: Count = 2
    groups: Count = 1
    """P: groups per batch."""
    total: int = 0
    """Groups to deliver in the whole run, including those of earlier processes."""
    phase: Phase = "train"
    first_step: int = 1
    """Step of the first batch."""
    temperature: float = 1.0
    pause_s: float = 0.5
    """Backoff before the second attempt; doubled for each further one."""
    lookahead: float = 0.3
    """Share of the running groups, from the oldest on, that a step may choose from: passing over more of them
    trains on quick rollouts first and lets the slow ones grow stale."""
    group_grace_s: float = 600.0
    """Seconds after the agent's limit until an attempt times out, if the grader's timeout is less."""
    whole: bool = True
    """False: returned rollouts contain no tokens and no files (the sink has them), to save memory."""

    @classmethod
    def of(cls, config: Config, **more: Any) -> Self:
        """Return the options of a run, with `more` of where its groups belong."""
        usual: dict[str, Any] = {"seed": config.run.seed, "temperature": config.engine.temperature}
        # No rollout may be reported as stalled before its own limit has passed.
        usual["stall_timeout_s"] = max(config.collect.stall_timeout_s, 2 * config.longest_wall_s)
        return config.collect.pick(cls, **{**usual, **more})

    def slots(self, number: int) -> list[Slot]:
        """Return the slots of a draw, counted from 0."""
        step, group = self.first_step + number // self.groups, number % self.groups
        return [Slot(phase=self.phase, step=step, group=group, slot=s) for s in range(self.group_size)]


def limit_s(task: Task, grace_s: float) -> float:
    """Return the seconds from an attempt's start until it must be decided, without engine downtime."""
    # A grading may take its own timeout, and be repeated once.
    return task.limits.wall_s + max(grace_s, 2 * task.grading.timeout_s)


TaskSupply = Callable[[int], Task]
"""The task of a draw, counted from 0."""
RejectReason = Callable[[Group], str]
"""Why the trainer cannot use a decided group (degenerate, truncated, infra, deadline), or empty."""


def accept_all(group: Group) -> str:
    """Accept every group."""
    return ""
