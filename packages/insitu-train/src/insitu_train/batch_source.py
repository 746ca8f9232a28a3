"""The groups of a training run's steps, from the collector and the run's store.

With max_staleness = 0 they are drawn for the step, else ahead of it. Never imports torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import AttemptRunner, Check, CollectOptions, RolloutObserver
from insitu.collect.pending_group import ResumedGroup, ResumeState
from insitu.collect.starvation import Activity
from insitu.collect.store_sink import StoreSink
from insitu.config import Config
from insitu.storage.lifecycle import RolloutState
from insitu.storage.store import Store
from insitu.tasks.mix import TaskMix
from insitu.types import Group, Task
from insitu_train.plan.step import PlanConfig, use_of
from insitu_train.samplers import GroupOutcome, TaskDraws


class Batches(Protocol):
    """The groups of one step after the other."""

    rollouts: int
    """Rollouts decided while a step waits for its groups; 0 = unknown."""

    def draw(self) -> None:
        """Queue the next step's rollouts for workers, before those of evaluations beside the step."""

    async def next(self) -> tuple[Sequence[Group], Mapping[str, Any]]:
        """Return the groups that the next step trains, and metrics of their collection."""

    def pending(self, version: int) -> None:
        """Handle a version that the trainer has and the engine does not have yet."""

    def published(self, version: int) -> None:
        """Handle a version that the engine samples with, also the same one after a skipped step."""


class _CollectedBatches:
    """Groups from the collector; made by `open_batches`."""

    def __init__(self, collector: Collector, options: CollectOptions) -> None:
        self._collector, self._synchronous = collector, not options.max_staleness
        self.rollouts = options.groups * options.group_size * self._synchronous

    def draw(self) -> None:
        """See Batches."""
        self._collector.draw()

    async def next(self) -> tuple[Sequence[Group], Mapping[str, Any]]:
        """See Batches."""
        batch = await self._collector.next_batch()
        if self._synchronous:
            return batch.groups, {}
        metrics: dict[str, Any] = {
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
        metrics |= {f"groups_{reason}": n for reason, n in sorted(batch.dropped.items())}
        return batch.groups, metrics

    def pending(self, version: int) -> None:
        """See Batches."""
        self._collector.version_pending(version)

    def published(self, version: int) -> None:
        """See Batches."""
        self._collector.version_published(version)


@asynccontextmanager
async def open_batches(
    config: Config,
    store: Store,
    source: TaskMix,
    attempts: AttemptRunner,
    sink: StoreSink,
    watcher: RolloutObserver,
    breaker: Breaker,
    *,
    check: Check,
    warn: Callable[[str], None],
    version: int,
    activity: Activity | None = None,
) -> AsyncIterator[_CollectedBatches]:
    """Run the collector inside the context; at its end no rollout is left open."""
    plan, options = PlanConfig.of(config), collect_options(config)
    draws = TaskDraws(source, _settled_groups(store))
    collector = Collector(
        attempts,
        sink,
        watcher,
        breaker,
        options,
        draws,
        reject_reason=lambda group: use_of(group, plan),
        check=check,
        warn=warn,
        version=version,
        resume=resume_state(store, draws.again, config.collect.groups_per_step),
        activity=activity,
    )
    async with collector.open():
        yield _CollectedBatches(collector, options)
    # left over in a resumed run
    left = [*store.open_rollouts(), *store.unused_graded()]
    store.discard([state.rollout_id for state in left if state.phase == "train"], "unused")


def collect_options(config: Config) -> CollectOptions:
    """Return the collector's options for training."""
    groups = config.collect.groups_per_step
    return CollectOptions.of(config, groups=groups, total=config.run.steps * groups)


def _settled_groups(store: Store) -> Callable[[], Sequence[GroupOutcome]]:
    """Return a function that returns the settled groups of training as of the newest committed step."""
    held: dict[int, Sequence[GroupOutcome]] = {}

    def outcomes() -> Sequence[GroupOutcome]:
        last = store.last_step()
        step = 0 if last is None else last.step
        if step not in held:
            held.clear()
            held[step] = [
                GroupOutcome(**{name: row[name] for name in GroupOutcome.__slots__})
                for row in store.group_outcomes()
            ]
        return held[step]

    return outcomes


def resume_state(store: Store, again: Callable[[int, str], Task], groups: int) -> ResumeState:
    """Return the draws of earlier processes of the run that were neither trained nor discarded."""
    # a rollout may be trained in another step than its place names, so places do not tell what is left
    states = [*store.open_rollouts(), *store.unused_graded()]
    drawn = sorted({(s.step, s.group) for s in states if s.phase == "train"})
    last, taken = store.last_place("train"), store.last_step()
    return ResumeState(
        draws=[_resumed_group(store, again, groups, step, group) for step, group in drawn],
        next_draw=0 if last is None else 1 + _number(last, groups),
        delivered=0 if taken is None else taken.step * groups,
    )


def _number(place: tuple[int, int], groups: int) -> int:
    """Return the number of the draw at a place."""
    return (place[0] - 1) * groups + place[1]


def _resumed_group(
    store: Store, again: Callable[[int, str], Task], groups: int, step: int, group: int
) -> ResumedGroup:
    members = store.group_states("train", step, group)
    number = _number((step, group), groups)
    return ResumedGroup(
        number=number,
        task=again(number, members[0].task_id),
        rollouts={m.rollout_id: store.rollout(m.rollout_id) for m in members if _graded(m)},
        given_up=frozenset(m.rollout_id for m in members if m.reason == "deadline"),
        tried=store.tried(f"train/{step:05d}/{group:03d}/"),
    )


def _graded(member: RolloutState) -> bool:
    return member.state in ("graded", "scored")
