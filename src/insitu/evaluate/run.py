"""`insitu rollout`: graded rollouts of many tasks without training, on any engine, resumable.

    source -> Evaluation -> AttemptExecutor (gateway, sandboxes, judge) -> store -> report

With a provider (`upstream`) the gateway forwards calls and stores their text; with engines it samples tokens.
Stored rollouts are not repeated after a kill. Does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.collect.breaker import Breaker
from insitu.config import Config
from insitu.errors import ConfigError, RecordError
from insitu.evaluate.evaluation import Evaluation
from insitu.evaluate.summary import PHASE, render, result_of, summarise, write_results
from insitu.grading.runners.find import runner_for
from insitu.progress.base import View
from insitu.runtime.engine import open_sampler
from insitu.runtime.preflight import Prepared, check_local_engine, prepare, prepare_tasks
from insitu.runtime.run import OpenSampler, open_agents, open_backend
from insitu.runtime.trackers import start_trackers
from insitu.storage.files import write_text
from insitu.storage.open_run import open_run
from insitu.storage.run_dir import REPORT, SESSIONS, RunDir
from insitu.storage.store import Store
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.storage.wall_clock import WALL_S, WallClock
from insitu.tasks.base import REWARD_ONLY, Split, TaskSource
from insitu.tasks.mix import TaskMix
from insitu.types import Rollout, Task

AGENT, AGENT_VERSION = "agent", "agent_version"
"""Keys of stored facts."""
CLOCK_S = 5.0
"""Interval at which the elapsed time is stored; at most that much is lost in a kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Options of one invocation that are not stored in the run's configuration."""

    resume: Path | None = None
    """Run directory to continue; the configuration must be the stored one, see `evaluate.resume`."""
    began: float = field(default_factory=time.monotonic)
    """time.monotonic() at the start of the command."""
    sampler: OpenSampler = open_sampler
    """Opens the engine; replaced in tests."""


def prepare_rollouts(config: Config, say: Callable[[str], None]) -> Prepared:
    """Check a run before anything is started or written.

    Raises InsituError.
    """
    return prepare(config, say, chosen_tasks, (check_local_engine,))


def chosen_tasks(config: Config, source: TaskMix) -> Sequence[Task]:
    """Return the tasks selected by [rollout], equally many of each task set.

    Raises ConfigError when there are none, TaskError when one cannot be graded.
    """
    table = config.rollout
    size = source.size(table.split)
    if size is None and not table.count:
        raise ConfigError(f"{source.name} has infinitely many tasks: set rollout.count")
    available = table.count if size is None else size
    count = min(table.count or available, available)
    if not count or (table.count > available):
        few = f"the {table.split} split has {size} tasks: lower rollout.count"
        note = _other_split_note(config, source) or few
        raise ConfigError(f"{source.name}: too few tasks for rollout.count = {table.count}: {note}")
    tasks = source.spread(table.split, count)
    for task in tasks:
        if task.grading.runner not in REWARD_ONLY:
            runner_for(task, source.oracle(task))
    return tasks


async def collect_rollouts(config: Config, view: View, options: RolloutOptions) -> Mapping[str, Any]:
    """Run or continue rollouts to the end; return what summary.json holds. Raises InsituError."""
    view.begin(f"{config.agent_names}, seed {config.run.seed}", 0)
    view.stage("checking the configuration and the tasks")
    prepared = None if options.resume else prepare_rollouts(config, view.note)
    async with AsyncExitStack() as stack:
        run, store = stack.enter_context(open_run("rollout", config, options.resume))
        if options.resume:
            run.config = config
        clock = WallClock(store, options.began)
        # A finished run is reported again even on a machine that could not continue it.
        tasks = prepared.tasks if prepared else prepare_tasks(config, view.note, chosen_tasks)[1]
        evaluation = Evaluation(phase=PHASE, tasks=tasks, samples=config.rollout.samples)
        missing = evaluation.missing(store)
        store.recover()
        view.note(f"run directory {run.path}")
        start_trackers(run.path, run.config, view.note)
        if missing:
            try:
                ready = prepared or prepare_rollouts(config, view.note)
                await _fill(run, store, evaluation, ready, view, clock, options)
            finally:
                # After a disk error, that error must be reported, not a failed write here.
                with contextlib.suppress(RecordError):
                    store.set_meta(WALL_S, clock.meta()[WALL_S])
        facts = {name: store.meta()[name] for name in (AGENT, AGENT_VERSION)}
        wall_s = float(store.meta()[WALL_S])
        summary = {**summarise(run, store, SESSIONS), **facts, "wall_s": round(wall_s, 1)}
        run.write_summary(summary)
        write_results(run, store)
        write_text(run.path / REPORT, render(summary))
        return summary


async def _fill(
    run: RunDir,
    store: Store,
    evaluation: Evaluation,
    prepared: Prepared,
    view: View,
    clock: WallClock,
    options: RolloutOptions,
) -> None:
    """Run the undecided rollouts."""
    c = run.config
    remove_stale_scratch()
    view.stage("starting the engine and the agents")
    async with (
        open_backend(run, prepared.renderer, view.note, options.sampler) as opened,
        open_agents(c, opened.backend, opened.engine, prepared.source, prepared.setups, view.note) as runtime,
    ):
        await opened.check()
        name, version = runtime.agents
        store.set_meta(AGENT, name)
        store.set_meta(AGENT_VERSION, version)
        planned = len(evaluation.tasks) * evaluation.samples
        view.begin(f"{name} {version}, {prepared.source.name}, seed {c.run.seed}", planned)
        if note := _other_split_note(c, prepared.source):
            view.note(note)
        view.stage(f"{len(evaluation.tasks)} tasks, {evaluation.samples} each", planned)
        breaker, notes = Breaker(c.collect.max_consecutive_failures), _Notes(store, clock, view.note)
        running = evaluation.open(c, store, notes, runtime.attempts(run), view, breaker, check=opened.check)
        async with running as collector:
            await collector.next_batch()
    view.eval_done(f"{c.rollout.split} tasks", result_of(c, store.outcomes(PHASE, 0)).score)


class _Notes:
    """Implements collect.store_sink.AttemptObserver: tells of failures, and stores the elapsed time."""

    def __init__(self, store: Store, clock: WallClock, note: Callable[[str], None]) -> None:
        self._store, self._clock, self._note = store, clock, note
        self._noted_s = time.monotonic()

    def decided(self, rollout: Rollout) -> None:
        if time.monotonic() - self._noted_s >= CLOCK_S:
            self._store.set_meta(WALL_S, self._clock.meta()[WALL_S])
            self._noted_s = time.monotonic()

    def failed(self, rollout: Rollout) -> None:
        slot = int(rollout.id.rpartition("/")[2])
        self._note(
            f"{rollout.task_id} {slot}: attempt {rollout.attempt} could not be graded: {rollout.error}"
        )


def _other_split_note(config: Config, source: TaskSource) -> str:
    """Return a note about tasks in the other split; empty if there are none or infinitely many."""
    table = config.rollout
    other: Split = "train" if table.split == "eval" else "eval"
    here, there = source.size(table.split), source.size(other)
    if here is None or not there:
        return ""
    return (
        f"the {table.split} split has {here} of {here + there} tasks (tasks.eval_share);"
        f' rollout.split = "{other}" takes the others'
    )
