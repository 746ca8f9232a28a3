"""Collect the groups of a list of tasks: evaluations, and rollouts without training."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector, without_tokens
from insitu.collect.options import (
    AttemptRunner,
    Check,
    CollectOptions,
    GroupScorer,
    ResumableSink,
    RolloutObserver,
    nothing_to_check,
)
from insitu.collect.pending_group import ResumedGroup, ResumeState
from insitu.collect.starvation import Activity
from insitu.types import Task


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
    """Run rollouts inside the context; `next_batch` returns a group per task, in task order, slots in order.

    It raises when breaker or check stop the run, and TrainError at the stall timeout.
    """
    o = options.changed(max_staleness=0, groups=len(tasks), total=len(tasks), group_deadline_s=0.0)
    whole = o.whole or (isinstance(attempts, GroupScorer) and attempts.scores_groups)
    held = {r.id: r if whole else without_tokens(r) for r in sink.held(o.phase, o.first_step)}
    tried = sink.tried(o.phase, o.first_step)
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
