"""Collect the groups of a list of tasks: evaluations, and rollouts without training."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import (
    AttemptRunner,
    Check,
    CollectOptions,
    ResumableSink,
    RolloutObserver,
    nothing_to_check,
)
from insitu.collect.pending_group import ResumedGroup, ResumeState
from insitu.collect.starvation import Activity
from insitu.types import Group, Task


async def collect_groups(
    attempts: AttemptRunner,
    sink: ResumableSink,
    watcher: RolloutObserver,
    breaker: Breaker,
    options: CollectOptions,
    tasks: Sequence[Task],
    *,
    check: Check = nothing_to_check,
    version: int = 0,
) -> Sequence[Group]:
    """Return one group per task, in task order, slots in order: one synchronous batch.

    Raises when breaker or check stop the run, and TrainError at the stall timeout.
    """
    if not tasks:
        return ()
    running = open_groups(attempts, sink, watcher, breaker, options, tasks, check=check, version=version)
    async with running as collector:
        return (await collector.next_batch()).groups


@asynccontextmanager
async def open_groups(
    attempts: AttemptRunner,
    sink: ResumableSink,
    watcher: RolloutObserver,
    breaker: Breaker,
    options: CollectOptions,
    tasks: Sequence[Task],
    *,
    check: Check = nothing_to_check,
    version: int = 0,
    activity: Activity | None = None,
) -> AsyncIterator[Collector]:
    """Run the rollouts of `collect_groups` inside the context; `next_batch` returns all of its groups."""
    o = options.changed(max_staleness=0, groups=len(tasks), total=len(tasks), group_deadline_s=0.0)
    held, tried = sink.held(o.phase, o.first_step), sink.tried(o.phase, o.first_step)
    for number, task in enumerate(tasks):
        sink.plan(o.slots(number), task.id, version)
    draws = [
        ResumedGroup(number=number, task=task, rollouts=held, tried=tried)
        for number, task in enumerate(tasks)
    ]
    resume = ResumeState(draws=draws, next_draw=len(tasks))
    collector = Collector(
        attempts,
        sink,
        watcher,
        breaker,
        o,
        tasks.__getitem__,
        check=check,
        version=version,
        resume=resume,
        activity=activity,
    )
    async with collector.open():
        yield collector
