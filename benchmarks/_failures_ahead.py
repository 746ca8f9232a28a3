"""The failure experiment with rollouts ahead of the trainer: what late failures do under a deadline.

The world's rollouts take time (log-normal, median 60 s), sandboxes die in the middle of them, and the real
asynchronous collector fills groups at S = 2, in virtual time. A rollout that is not through by its deadline
is stopped and graded 0, in the world without failures too. Beside insitu's rule, in which every try has all
its time, is the one in which a further try has what the lost one left. Caller: bench.failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks._failures_world import GROUP_SIZE, TRIES, Credit, Nowhere, Setting, World, said
from insitu.attempt import AttemptSpec, ignore_cancelled, no_wait
from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import CollectOptions
from insitu.types import Group, Limits, Rollout, Status, Task, task_hash
from insitu_train.plan.step import PlanConfig, plan_step
from tests.fakes.attempts import fake_rollout
from tests.fakes.virtual_time import run_virtual

GROUPS, WORKERS, STALENESS = 8, 64, 2
MEDIAN_S, DEADLINE_S, TRAIN_S, PUBLISH_S = 60.0, 480.0, 240.0, 2.0
"""As in `python -m benchmarks async`."""
Floats = npt.NDArray[np.float64]
Rule = Literal["insitu", "leave", "shared_time"]
"""leave: as with collect.late_groups = "skip". shared_time: a further try is stopped, and graded, at the
deadline of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What the trainer got, batch by batch."""

    batches: Sequence[Sequence[Group]] = field(repr=False)
    failed_first: float
    """Share of first tries."""
    ungraded: float
    """Share of slots."""
    stopped: float
    """Share of slots that ran out of time."""
    idle: float
    """Share of the time that the trainer waited."""


class DyingBoxes:
    """Decides attempts as the world says, in its time; implements collect.options.AttemptRunner."""

    def __init__(self, world: World, setting: Setting, rule: Rule) -> None:
        self._world, self._setting, self._rule = world, setting, rule
        self._permits = asyncio.Semaphore(WORKERS)
        self._first: dict[str, float] = {}
        """Rollout -> when its first try began."""
        self._takes = MEDIAN_S * np.exp(world.log_length)
        if not setting.redraw:
            self._takes = np.broadcast_to(self._takes[:, :, :1], self._takes.shape)
        self._dies = dying(self._takes, world.luck, setting)
        self.failed_first = 0
        self.version = 0
        """Of the weights in force."""

    async def run(
        self,
        spec: AttemptSpec,
        on_start: Callable[[], None],
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        number, slot = draw_of(spec.rollout_id)
        at = (number, slot, spec.attempt - 1)
        async with self._permits:
            await ready()
            on_start()
            version, now = self.version, asyncio.get_running_loop().time()
            first = self._first.setdefault(spec.rollout_id, now)
            limit = spec.task.limits.wall_s
            if self._rule == "shared_time":
                limit = max(0.0, limit - (now - first))
            lives = min(float(self._takes[at]), limit)
            dies = float(self._dies[at])
            await asyncio.sleep(min(lives, dies))
        if dies <= lives or not limit:
            self.failed_first += spec.attempt == 1
            return fake_rollout(spec, "the sandbox was lost")
        done = self._takes[at] <= limit
        solved = self._world.draw(number, slot, spec.attempt, self._setting).solved
        decided = fake_rollout(spec, float(done and solved))
        status = Status.OK if done else Status.TRUNCATED
        return replace(decided, status=status, trajectory=said(spec.rollout_id, version))


def dying(takes: Floats, luck: Floats, setting: Setting) -> Floats:
    """[groups, slots, tries]: seconds until a try's sandbox dies, of those that it would be used; inf =
    later.

    uncorrelated: at any moment of a rollout, with the same chance for all. correlated: a constant hazard."""
    used = np.minimum(takes, DEADLINE_S)
    if not setting.rate:
        return np.full(takes.shape, np.inf)
    if setting.chances == "uncorrelated":
        return np.where(luck < setting.rate, used * luck / setting.rate, np.inf)
    low, high = 0.0, 1.0
    for _ in range(60):
        hazard = (low + high) / 2
        share = float((1.0 - np.exp(-hazard * used[:, :, 0])).mean())
        low, high = (hazard, high) if share < setting.rate else (low, hazard)
    dies: Floats = -np.log1p(-luck) / low
    return dies


def draw_of(rollout_id: str) -> tuple[int, int]:
    """(task, slot) of the world that a rollout stands for."""
    _, step, group, slot = rollout_id.split("/")
    return (int(step) - 1) * GROUPS + int(group), int(slot)


def ahead(world: World, setting: Setting, rule: Rule = "insitu") -> Collected:
    """Every group of the world through the collector, in virtual time."""
    logging.getLogger("insitu.collect").setLevel(logging.ERROR)
    return run_virtual(_ahead(world, setting, rule))


async def _ahead(world: World, setting: Setting, rule: Rule) -> Collected:
    sandboxes, sink, clock = DyingBoxes(world, setting, rule), Nowhere(), asyncio.get_running_loop().time
    options = CollectOptions(
        seed=0,
        group_size=GROUP_SIZE,
        attempts=TRIES,
        groups=GROUPS,
        max_staleness=STALENESS,
        total=world.groups,
        late_groups="skip" if rule == "leave" else "wait",
        group_deadline_s=DEADLINE_S,
        replace_degenerate=0.0,
        stall_timeout_s=1e9,
    )
    task = Task(id="t", prompt="p", files={}, limits=Limits(wall_s=1e9))
    task = replace(task, content_hash=task_hash(task.prompt, task.files, task.grading))
    collector = Collector(
        sandboxes, sink, sink, Breaker(1000), options, lambda number: replace(task, id=str(number))
    )
    batches: list[Sequence[Group]] = []
    waited = 0.0
    async with collector.open() as running:
        for version in range(1, 1 + world.groups // GROUPS):
            batch = await running.next_batch()
            batches.append(batch.groups)
            waited += batch.waited_s
            await asyncio.sleep(TRAIN_S)
            running.version_pending(version)
            await asyncio.sleep(PUBLISH_S)
            sandboxes.version = version
            running.version_published(version)
    held = [r.status for groups in batches for g in groups for r in g.rollouts]
    slots = world.groups * GROUP_SIZE
    return Collected(
        batches=batches,
        failed_first=sandboxes.failed_first / slots,
        ungraded=1.0 - sum(s is not Status.INFRA_FAILED for s in held) / slots,
        stopped=held.count(Status.TRUNCATED) / slots,
        idle=waited / clock(),
    )


def credits_ahead(world: World, setting: Setting, collected: Collected, plan: PlanConfig) -> list[Credit]:
    """The advantages that the planner gives, rollout by rollout. What would not have been through by the
    deadline is unsolved in truth."""
    found = []
    for groups in collected.batches:
        attempts = {r.id: r.attempt for g in groups for r in g.rollouts}
        for row in plan_step(groups, plan).rows:
            number, slot = draw_of(row.rollout_id)
            draw = world.draw(number, slot, attempts[row.rollout_id], setting)
            through = MEDIAN_S * np.exp(draw.log_length) <= DEADLINE_S
            found.append(
                Credit(
                    group=number,
                    advantage=row.advantage,
                    solved=bool(draw.solved and through),
                    log_length=draw.log_length,
                )
            )
    return found
