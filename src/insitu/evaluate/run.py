"""`insitu rollout`: graded rollouts of many tasks without training, on any engine, resumable.

    source -> collect_groups -> AttemptExecutor (gateway, sandboxes, judge) -> store -> report

With a provider (`upstream`) the gateway forwards calls and stores their text; with engines it samples tokens.
Stored rollouts are not repeated after a kill. Does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.collect.breaker import Breaker
from insitu.collect.groups import collect_groups
from insitu.collect.options import CollectOptions
from insitu.config import Config
from insitu.errors import ConfigError, RecordError
from insitu.evaluate.results import PHASE, STEP, ResultSink, check_same_tasks, count_missing
from insitu.evaluate.summary import count_per_task, render, summarise, write_results
from insitu.grading.runners.find import runner_for
from insitu.progress.base import View
from insitu.runtime.engine import open_sampler
from insitu.runtime.preflight import Prepared, check_local_engine, prepare, prepare_tasks
from insitu.runtime.run import OpenSampler, open_agents, open_backend
from insitu.runtime.running import RunningAgents
from insitu.storage.files import write_text
from insitu.storage.open_run import open_run
from insitu.storage.run_dir import REPORT, SESSIONS, RunDir
from insitu.storage.store import Score, Store
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.storage.wall_clock import WALL_S, WallClock
from insitu.tasks.base import REWARD_ONLY, Split, TaskSource
from insitu.tasks.mix import TaskMix
from insitu.tracking.start import start_trackers
from insitu.types import Task

AGENT, AGENT_VERSION = "agent", "agent_version"
"""Keys of stored facts."""


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
    available = table.count if size is None else max(0, size - table.start)
    count = min(table.count or available, available)
    if not count or (table.count > available):
        few = f"the {table.split} split has {size} tasks: lower rollout.count"
        raise ConfigError(
            f"{source.name}: too few tasks for rollout.start = {table.start} and rollout.count ="
            f" {table.count}: {_other_split_note(config, source) or few}"
        )
    tasks = source.spread(table.split, table.start, count)
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
        check_same_tasks(store, tasks, config.rollout.samples)
        view.note(f"run directory {run.path}")
        start_trackers(run.path, run.config, view.note)
        if count_missing(store, tasks, config.rollout.samples):
            try:
                ready = prepared or prepare_rollouts(config, view.note)
                await _fill(run, store, ready, view, clock, options)
            finally:
                # After a disk error, that error must be reported, not a failed write here.
                with contextlib.suppress(RecordError):
                    store.set_meta(WALL_S, clock.meta()[WALL_S])
        facts = {name: store.meta()[name] for name in (AGENT, AGENT_VERSION)}
        wall_s = float(store.meta()[WALL_S])
        summary = {**summarise(run, store, tasks, SESSIONS), **facts, "wall_s": round(wall_s, 1)}
        run.write_summary(summary)
        write_results(run, store)
        write_text(run.path / REPORT, render(summary))
        return summary


async def _fill(
    run: RunDir,
    store: Store,
    prepared: Prepared,
    view: View,
    clock: WallClock,
    options: RolloutOptions,
) -> None:
    """Run the undecided rollouts."""
    remove_stale_scratch()
    view.stage("starting the engine and the agents")
    async with (
        open_backend(run, prepared.renderer, view.note, options.sampler) as opened,
        open_agents(
            run.config, opened.backend, opened.engine, prepared.source, prepared.setups, view.note
        ) as runtime,
    ):
        await opened.check()
        name, version = runtime.agents
        store.set_meta(AGENT, name)
        store.set_meta(AGENT_VERSION, version)
        await _collect(run, store, runtime, opened.check, prepared, view, clock)


async def _collect(
    run: RunDir,
    store: Store,
    runtime: RunningAgents,
    check: Callable[[], Awaitable[None]],
    prepared: Prepared,
    view: View,
    clock: WallClock,
) -> None:
    c, source, tasks = run.config, prepared.source, prepared.tasks
    planned = len(tasks) * c.rollout.samples
    view.begin(f"{' '.join(runtime.agents)}, {source.name}, seed {c.run.seed}", planned)
    if note := _other_split_note(c, source):
        view.note(note)
    view.stage(f"{len(tasks)} tasks, {c.rollout.samples} each", planned)
    sink = ResultSink(store, clock, view.note)
    options = c.collect.pick(
        CollectOptions,
        seed=c.run.seed,
        group_size=c.rollout.samples,
        phase=PHASE,
        first_step=STEP,
        temperature=c.engine.temperature,
        whole=False,
        # A rollout must not be reported as stalled before its own timeout.
        stall_timeout_s=max(c.collect.stall_timeout_s, 2 * c.longest_wall_s),
    )
    await collect_groups(runtime.attempts(run), sink, view, Breaker(), options, tasks, check=check)
    per_task = count_per_task(store.outcomes(PHASE, STEP), len(tasks))
    view.eval_done(f"{c.rollout.split} tasks", Score.of_tasks(per_task))


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
