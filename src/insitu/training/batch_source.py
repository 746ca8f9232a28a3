"""Where the training loop gets a step's groups: made for the step (S = 0), or ahead of it (S >= 1).

    SyncBatches:  ask -> dispatcher -> the step's own groups            reproducible bit for bit
    Ahead:   ask -> collector, at work all the time -> what is ready, at most S versions old

Never imports torch. Called by loop.py.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.dispatcher import AttemptRunner, Check, CollectOptions, Dispatcher, RolloutObserver
from insitu.collect.options import AsyncOptions, ResumeState
from insitu.collect.pending_group import ResumedGroup
from insitu.config import Config
from insitu.storage.lifecycle import RolloutState
from insitu.storage.store import Store
from insitu.tasks.base import TaskSource
from insitu.training.plan.step import PlanConfig, use_of
from insitu.training.store_sink import StoreSink
from insitu.types import Group


class Batches(Protocol):
    """The loop's side."""

    @property
    def rollouts(self) -> int:
        """How many will be decided while a step waits for its groups; 0 = no telling."""

    async def next(self, step: int) -> tuple[Sequence[Group], Mapping[str, Any]]:
        """The groups that this step trains, and what there is to say of how they were collected."""

    def pending(self, version: int) -> None:
        """The trainer has this version; the engine does not yet."""

    def published(self, version: int) -> None:
        """The engine samples with it, or the step was skipped and it did all along."""


class SyncBatches:
    """Synchronous: the groups of a step are drawn when it begins."""

    def __init__(self, dispatcher: Dispatcher, source: TaskSource, groups: int, group_size: int) -> None:
        self._dispatcher, self._source, self._groups = dispatcher, source, groups
        self.rollouts = groups * group_size

    async def next(self, step: int) -> tuple[Sequence[Group], Mapping[str, Any]]:
        tasks = self._source.tasks("train", (step - 1) * self._groups, self._groups)
        return await self._dispatcher.collect("train", step, tasks), {}

    def pending(self, version: int) -> None:
        """Nothing is under way."""

    def published(self, version: int) -> None:
        """Nothing waits for it."""


class AsyncBatches:
    """Asynchronous. Made by `open_ahead`."""

    rollouts = 0

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def next(self, step: int) -> tuple[Sequence[Group], Mapping[str, Any]]:
        batch = await self._collector.next_batch()
        told: dict[str, Any] = {
            "staleness_max": batch.staleness_max,
            "staleness_mean": batch.staleness_mean,
            "waited_s": batch.waited_s,
            "rollout_s": batch.useful_s + batch.wasted_s,
            "wasted_s": batch.wasted_s,
            "wasted": batch.wasted,
            "groups_drawn": batch.drawn,
            "groups_running": batch.running,
            "groups_ready": batch.ready,
            "rollouts_late": batch.late,
        }
        told |= {f"groups_{reason}": n for reason, n in sorted(batch.dropped.items())}
        return batch.groups, told

    def pending(self, version: int) -> None:
        self._collector.version_pending(version)

    def published(self, version: int) -> None:
        self._collector.version_published(version)


@asynccontextmanager
async def open_ahead(
    config: Config,
    store: Store,
    source: TaskSource,
    attempts: AttemptRunner,
    sink: StoreSink,
    watcher: RolloutObserver,
    *,
    check: Check,
    warn: Callable[[str], None],
    version: int,
) -> AsyncIterator[AsyncBatches]:
    """Rollouts are under way inside; at the end of the run nothing of them is left open."""
    plan = PlanConfig.of(config)
    collector = Collector(
        attempts,
        sink,
        watcher,
        Breaker(config.collect.max_consecutive_failures),
        async_options(config),
        lambda number: source.tasks("train", number, 1)[0],
        reject_reason=lambda group: use_of(group, plan),
        check=check,
        warn=warn,
        version=version,
        resume=left_before(store, source, config.tasks.groups_per_step),
    )
    async with collector.open():
        yield AsyncBatches(collector)
    # What a resumed run had more than it needed.
    left = [*store.open_rollouts(), *store.unused_graded()]
    store.discard([state.rollout_id for state in left if state.phase == "train"], "unused")


def collect_options(config: Config) -> CollectOptions:
    return CollectOptions(
        seed=config.run.seed,
        group_size=config.collect.group_size,
        attempts=config.collect.attempts,
        temperature=config.engine.temperature,
        grace_s=config.collect.group_grace_s,
        # no rollout may seem to be stuck before its own limit has passed
        stall_timeout_s=max(config.collect.stall_timeout_s, 2 * config.limits.wall_s),
    )


def async_options(config: Config) -> AsyncOptions:
    c = config.collect
    groups, members = config.tasks.groups_per_step, collect_options(config)
    return AsyncOptions(
        members=members,
        groups=groups,
        staleness=c.max_staleness,
        total=config.run.steps * groups,
        lookahead=c.lookahead,
        late_groups=c.late_groups,
        group_min=c.group_min,
        deadline_s=c.group_deadline_s or math.inf,
        grace_s=c.group_grace_s,
        replace_degenerate=round(c.replace_degenerate * groups),
        stall_timeout_s=members.stall_timeout_s,
    )


def left_before(store: Store, source: TaskSource, groups: int) -> ResumeState:
    """What earlier processes of the run drew and neither trained nor discarded. The optimizer step that
    trained a rollout is not the one of its place, so places say nothing of what is left."""
    states = [*store.open_rollouts(), *store.unused_graded()]
    drawn = sorted({(s.step, s.group) for s in states if s.phase == "train"})
    last, taken = store.last_place("train"), store.last_step()
    return ResumeState(
        draws=[_held(store, source, groups, step, group) for step, group in drawn],
        next_draw=0 if last is None else 1 + _number(last, groups),
        delivered=0 if taken is None else taken.step * groups,
    )


def _number(place: tuple[int, int], groups: int) -> int:
    """Of the draw at a place."""
    return (place[0] - 1) * groups + place[1]


def _held(store: Store, source: TaskSource, groups: int, step: int, group: int) -> ResumedGroup:
    members = store.group_states("train", step, group)
    number = _number((step, group), groups)
    return ResumedGroup(
        number=number,
        task=source.tasks("train", number, 1)[0],
        rollouts={m.rollout_id: store.rollout(m.rollout_id) for m in members if _graded(m)},
        given_up=frozenset(m.rollout_id for m in members if m.reason == "deadline"),
        tried=store.tried(f"train/{step:05d}/{group:03d}/"),
    )


def _graded(member: RolloutState) -> bool:
    return member.state in ("graded", "scored")
