"""A world of tasks, rollouts and sandboxes that fail, and the ways in which trainers treat what failed.

Each task has a solve probability. Harder tasks and failed solutions take longer; in half of the settings a
sandbox fails the more likely the longer the rollout is. What a rollout would have been is known here, so that
advantages can be compared with those of the same rollouts in a world without failures. The collector's
collector and the planner are the real ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from insitu.attempt import AttemptSpec, ignore_cancelled, no_wait
from insitu.collect.breaker import Breaker
from insitu.collect.groups import open_groups
from insitu.collect.options import CollectOptions, Phase, Slot
from insitu.types import (
    Group,
    Ledger,
    Limits,
    Rollout,
    Segment,
    Status,
    Task,
    Timings,
    Trajectory,
    task_hash,
)
from insitu_train.plan.step import PlanConfig, plan_step

GROUPS_PER_STEP, GROUP_SIZE = 50, 8
TRIES, MOST_TRIES = 3, 6
"""As `collect.attempts` is by default, and the most that are simulated."""
Treatment = Literal["insitu", "no_retry", "reward_0", "drop_group"]
Chances = Literal["uncorrelated", "correlated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One rollout as it would be if nothing failed."""

    solved: bool
    log_length: float
    """Of its duration, in standard deviations from the mean of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How sandboxes fail."""

    rate: float
    """Share of first tries that fail."""
    chances: Chances
    redraw: bool = False
    """A further try is another draw, as at a server that does not repeat its draws; else the same one: draws
    hang on a slot's name, not on the number of its try."""


class World:
    """Tasks, and what each slot of them draws; a function of the seed."""

    def __init__(self, groups: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.chance = rng.uniform(0.05, 0.95, groups)
        """Solve probability by task."""
        shape = (groups, GROUP_SIZE, MOST_TRIES)
        self.solved = rng.random(shape) < self.chance[:, None, None]
        spread = rng.normal(0.0, 0.6, shape)
        raw = 1.6 * (0.5 - self.chance[:, None, None]) + 0.4 * ~self.solved + spread
        self.log_length = (raw - raw.mean()) / raw.std()
        self.luck = rng.random(shape)
        """Of each try's sandbox."""

    @property
    def groups(self) -> int:
        return len(self.chance)

    def draw(self, group: int, slot: int, attempt: int, setting: Setting) -> Draw:
        """What try `attempt`, from 1, at a slot gives if its sandbox lives."""
        at = (group, slot, attempt - 1 if setting.redraw else 0)
        return Draw(solved=bool(self.solved[at]), log_length=float(self.log_length[at]))

    def failures(self, setting: Setting) -> npt.NDArray[np.bool_]:
        """[groups, slots, tries]: whether the sandbox of a try fails."""
        chance: npt.NDArray[np.float64] = np.array(setting.rate)
        if setting.chances == "correlated":
            lengths = np.exp(self.log_length if setting.redraw else self.log_length[:, :, :1])
            chance = 1.0 - np.exp(-self._hazard(setting.rate) * lengths)
        failed: npt.NDArray[np.bool_] = self.luck < chance
        return failed

    def _hazard(self, rate: float) -> float:
        """Failures per unit of time at which `rate` of all first tries fail."""
        lengths = np.exp(self.log_length[:, :, 0])
        low, high = 0.0, 10.0
        for _ in range(40):
            middle = (low + high) / 2
            if float((1.0 - np.exp(-middle * lengths)).mean()) < rate:
                low = middle
            else:
                high = middle
        return low


class Sandboxes:
    """Decides attempts as the world says; implements collect.options.AttemptRunner."""

    def __init__(self, world: World, setting: Setting) -> None:
        self._world, self._setting, self._fails = world, setting, world.failures(setting)

    async def run(
        self,
        spec: AttemptSpec,
        on_start: Callable[[], None],
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        group, slot = place_of(spec.rollout_id)
        on_start()
        failed = bool(self._fails[group, slot, spec.attempt - 1])
        draw = self._world.draw(group, slot, spec.attempt, self._setting)
        return Rollout(
            id=spec.rollout_id,
            task_id=spec.task.id,
            category="",
            status=Status.INFRA_FAILED if failed else Status.OK,
            reward=None if failed else float(draw.solved),
            trajectory=said(spec.rollout_id),
            verdict=None,
            changed={},
            deleted=(),
            timings=Timings(),
            attempt=spec.attempt,
            error="the sandbox was lost" if failed else "",
        )


def place_of(rollout_id: str) -> tuple[int, int]:
    """(task, slot) of the world that a rollout stands for."""
    _, step, group, slot = rollout_id.split("/")
    return int(step) * GROUPS_PER_STEP + int(group), int(slot)


def said(rollout_id: str, version: int = 0) -> Trajectory:
    """The planner wants tokens: one prompt id, one that was sampled by a version."""
    mask = np.array([False, True])
    segment = Segment(
        rollout_id=rollout_id,
        index=0,
        kind="sampled",
        label="final",
        ids=np.array([1, 2], np.int32),
        mask=mask,
        logprobs=np.array([0.0, -1.0], np.float32),
        versions=np.full(2, version, np.int32),
    )
    return Trajectory(segments=(segment,), turns=(), ledger=Ledger(captured=1, trained=1))


class Nowhere:
    """A sink that keeps nothing and a view that shows nothing."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None: ...

    def start(self, rollout_id: str, attempt: int, version: int) -> None: ...

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def rescored(self, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None: ...

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None: ...

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None: ...

    def held(self, phase: Phase, step: int) -> tuple[Rollout, ...]:
        return ()

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        return {}

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


async def collected(world: World, setting: Setting, tries: int) -> list[list[Group]]:
    """The groups of every step, as the collector decides them."""
    nowhere = Nowhere()
    options = CollectOptions(seed=0, group_size=GROUP_SIZE, attempts=tries, pause_s=0.0)
    attempts, breaker = Sandboxes(world, setting), Breaker(1000)
    task = Task(id="t", prompt="p", files={}, limits=Limits())
    task = replace(task, content_hash=task_hash(task.prompt, task.files, task.grading))
    steps = []
    for step in range(world.groups // GROUPS_PER_STEP):
        tasks = [replace(task, id=f"{step}/{g}") for g in range(GROUPS_PER_STEP)]
        at = options.changed(first_step=step)
        async with open_groups(attempts, nowhere, nowhere, breaker, at, tasks) as collector:
            steps.append(list((await collector.next_batch()).groups))
    return steps


def treated(groups: Sequence[Group], treatment: Treatment) -> list[Group]:
    """What a trainer of that habit makes of collected groups."""
    if treatment == "drop_group":
        return [g for g in groups if all(r.status is not Status.INFRA_FAILED for r in g.rollouts)]
    if treatment == "reward_0":
        return [replace(g, rollouts=tuple(_zeroed(r) for r in g.rollouts)) for g in groups]
    return list(groups)


def _zeroed(rollout: Rollout) -> Rollout:
    if rollout.status is not Status.INFRA_FAILED:
        return rollout
    return replace(rollout, status=Status.AGENT_FAILED, reward=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One trained rollout: what it got, and what it is."""

    group: int
    advantage: float
    solved: bool
    """The true state, whatever its trainer received."""
    log_length: float


def credits_of(
    world: World, setting: Setting, steps: Sequence[Sequence[Group]], treatment: Treatment, plan: PlanConfig
) -> list[Credit]:
    """The advantages that the planner gives, rollout by rollout."""
    found = []
    for step in steps:
        groups = treated(step, treatment)
        attempts = {r.id: r.attempt for g in groups for r in g.rollouts}
        for row in plan_step(groups, plan).rows:
            group, slot = place_of(row.rollout_id)
            draw = world.draw(group, slot, attempts[row.rollout_id], setting)
            found.append(
                Credit(group=group, advantage=row.advantage, solved=draw.solved, log_length=draw.log_length)
            )
    return found
