"""Training runs: the learner, the engine and its weights beside the runtime, and the run directory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from insitu.config import Config, model_folder
from insitu.engines.factory import open_server
from insitu.engines.replicas import EngineSet
from insitu.errors import RecordError
from insitu.gateway.token_backend import TokenBackend
from insitu.progress.base import View
from insitu.runtime.preflight import Checks, Prepared, check_names, prepare
from insitu.runtime.run import open_agents
from insitu.runtime.trackers import check_trackers, start_trackers
from insitu.storage.open_run import open_run
from insitu.storage.run_dir import RunDir, read_config, restore_steps
from insitu.storage.store import Store
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.storage.wall_clock import WALL_S, WallClock
from insitu.tasks.mix import TaskMix
from insitu.types import Task
from insitu_train.checks import check_learner, check_reference, check_service, check_trained
from insitu_train.evaluations import check_evaluations
from insitu_train.gauges import write_gauges
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec, say_hosts
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.loop import (
    EXTRA,
    RunAgents,
    RunParts,
    TrainingLoop,
    TrainOptions,
    finished_run,
    keep_start_model,
)
from insitu_train.plan.step import PlanConfig
from insitu_train.recovery import check_steps, committed
from insitu_train.samplers import check_draws
from insitu_train.served_batches import NoEngine, fit_to_sessions
from insitu_train.weights.files import (
    DeltaPublisher,
    DiskPublisher,
    OwnPublisher,
    Publisher,
    PublishOptions,
)
from insitu_train.weights.gpu import TransferPublisher, Transport

log = logging.getLogger(__name__)


WEIGHTS = "weights"
"""Folder of a run directory with published weights."""


def _publisher(run: RunDir, learner: Learner, engines: EngineSet) -> Publisher:
    """Return what brings the learner's weights to the run's servers; nothing is published yet."""
    if run.config.engine.in_learner:
        return OwnPublisher(learner, engines)
    spool = run.path / WEIGHTS
    options = PublishOptions.of(run.config, spool)
    publish = run.config.engine.publish
    if publish in ("ipc", "nccl"):
        transport: Transport = "ipc" if publish == "ipc" else "nccl"
        return TransferPublisher(learner, engines, options, transport)
    if publish == "delta":
        return DeltaPublisher(learner, engines, options, spool)
    return DiskPublisher(learner, engines, options)


def _own_engine(learner: Learner, config: Config, note: Callable[[str], None]) -> EngineSet:
    """Return the learner's own engine as the one server; its supervisor decides when to give it up."""
    servers = {"learner": learner.engine}
    return EngineSet(servers, max_wait_s=math.inf, restarts=config.train.restarts, say=note)


def _prepare_training(config: Config, say: Callable[[str], None]) -> Prepared:
    """Check a training run before anything of it is started or written. Raises InsituError."""
    own = (check_trained, check_service, check_names, check_learner, check_reference)
    return prepare(config, say, _examples, own)


def _examples(config: Config, mix: TaskMix) -> Sequence[Task]:
    """Return tasks that represent all others; raise ConfigError where evaluations or samplers do not fit."""
    check_evaluations(config.eval, mix)
    check_draws(mix)
    return mix.examples()


def _prepare_served(config: Config) -> Config:
    """Check a training run on stored sessions and limit its steps to them. Raises InsituError."""
    checks = Checks()
    for check in (check_trained, check_learner, check_reference, check_trackers):
        checks.run(check, config)
    limited = checks.run(fit_to_sessions, config)
    checks.close()
    return limited or config


@asynccontextmanager
async def assemble(
    run: RunDir,
    store: Store,
    prepared: Prepared,
    note: Callable[[str], None] = log.warning,
    stage: Callable[[str], None] = log.info,
) -> AsyncIterator[RunParts]:
    """Open all parts of a run, from the last committed checkpoint if there is one.

    Raises RecordError when the start model is not the one that the run began with.
    """
    config, source, renderer = run.config, prepared.source, prepared.rules
    async with AsyncExitStack() as stack:
        engines: EngineSet | None = None
        if not (config.engine.in_learner or config.engine.launch):
            # a wrong server is refused before a learner has opened the model
            stage("checking the engine")
            engines = await stack.enter_async_context(open_server(config, renderer, note))
        stage("starting the learner")
        say_hosts(config, note)
        spec = LearnerSpec.of(config, model=model_folder(config), log=run.logs / "learner.log")
        learner = await stack.enter_async_context(Learner.start(spec))
        keep_start_model(store, learner)
        if engines is None:
            own, launched = config.engine.in_learner, open_server(config, renderer, note)
            engines = await stack.enter_async_context(_own_engine(learner, config, note) if own else launched)
        plan_config = PlanConfig.of(config)
        supervisor = LearnerSupervisor(
            learner,
            _publisher(run, learner, engines),
            lambda: committed(run, store, plan_config),
            restarts=config.train.restarts,
            say=note,
        )
        if config.engine.in_learner:
            engines.check = supervisor.check
        await supervisor.begin()
        stage("starting the agents")
        backend = TokenBackend(engines, renderer)
        runtime = await stack.enter_async_context(
            open_agents(config, backend, engines, source, prepared.setups, note)
        )
        agents = RunAgents(
            source=source, names=runtime.agents, attempts=runtime.attempts(run), engine=engines
        )
        gauges = write_gauges(run.timeline(), store, runtime.open_sessions, runtime.gauges)
        await stack.enter_async_context(gauges)
        yield RunParts(agents=agents, learner=learner, supervisor=supervisor, plan_config=plan_config)


@asynccontextmanager
async def _assemble_served(
    run: RunDir, store: Store, note: Callable[[str], None], stage: Callable[[str], None]
) -> AsyncIterator[RunParts]:
    """Open the learner of a run on stored sessions, which has no agents and no engine."""
    config = run.config
    stage("starting the learner")
    say_hosts(config, note)
    spec = LearnerSpec.of(config, model=model_folder(config), log=run.logs / "learner.log")
    async with Learner.start(replace(spec, samples=False)) as learner:
        keep_start_model(store, learner)
        plan_config = PlanConfig.of(config)
        supervisor = LearnerSupervisor(
            learner,
            NoEngine(),
            lambda: committed(run, store, plan_config),
            restarts=config.train.restarts,
            say=note,
        )
        await supervisor.begin()
        yield RunParts(agents=None, learner=learner, supervisor=supervisor, plan_config=plan_config)


def _length(config: Config) -> tuple[int, int]:
    """Return what decides when a run ends."""
    return config.run.steps, config.run.stop_after_evals


async def run_training(config: Config, view: View, options: TrainOptions) -> Mapping[str, Any]:
    """Run or continue a training run to its end; return what summary.json holds. Raises InsituError."""
    resume = options.resume
    longer = resume is not None and _length(config) != _length(read_config(resume))
    if resume and not longer and (summary := finished_run(resume, view.note)) is not None:
        return summary
    who = f"sessions of {config.collect.run}" if config.collect.run else config.agent_names
    view.begin(f"{who}, seed {config.run.seed}", 0)
    view.stage("checking the configuration and the tasks")
    prepared = None if config.collect.run else _prepare_training(config, view.note)
    if prepared is None and resume is None:
        config = _prepare_served(config)
    remove_stale_scratch()
    async with AsyncExitStack() as stack:
        run, store = stack.enter_context(open_run("train", config, resume))
        metrics = stack.enter_context(run.metrics())
        check_steps(run, store)
        changed = resume and config != run.config
        if changed:
            run.config = config
        clock = WallClock(store, options.began)
        store.recover()
        restore_steps(run, store, metrics)
        if EXTRA not in store.meta():
            store.set_meta(EXTRA, json.dumps(dict(options.extra)))
        view.note(f"run directory {run.path}")
        start_trackers(run.path, run.config, view.note)
        try:
            assembled = (
                assemble(run, store, prepared, view.note, view.stage)
                if prepared
                else _assemble_served(run, store, view.note, view.stage)
            )
            async with assembled as parts:
                if changed:
                    run.change(config)
                summary = await TrainingLoop(run, store, metrics, parts, view, clock).run()
        finally:
            # The disk may be what ended the run: its own line must come through.
            with contextlib.suppress(RecordError):
                store.set_meta(WALL_S, clock.meta()[WALL_S])
        summary = {**summary, "wall_s": round(clock.seconds(), 1), **json.loads(store.meta()[EXTRA])}
        run.write_summary(summary)
        return summary
