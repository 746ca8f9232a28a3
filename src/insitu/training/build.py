"""Puts a run together from its configuration: the one place where the parts of the path meet.

source, backend -> harness -> workers <-sockets- gateway -> family, engine (in the learner)
grader <- backend                                 learner <- model folder or checkpoint
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from insitu.agents.base import Harness
from insitu.agents.pool import WorkerPool
from insitu.attempt import Judge
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, model_folder
from insitu.engines.base import Engine
from insitu.engines.factory import open_server
from insitu.engines.vllm import VllmEngine
from insitu.errors import ConfigError
from insitu.gateway.server import Gateway
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.judge import TaskJudge
from insitu.grading.reward import reward_function
from insitu.runtime.agents import open_agents
from insitu.runtime.preflight import Prepared, check_reference, check_weights, prepare
from insitu.runtime.sandboxes import examples_of
from insitu.runtime.transcripts import transcript_reader
from insitu.sandbox.base import SandboxBackend
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.storage.temp_dirs import remove_stale_scratch, scratch_folder
from insitu.tasks.base import TaskSource
from insitu.training.learner.client import Learner, LearnerSpec
from insitu.training.learner.supervisor import Committed, LearnerSupervisor, RetryingEngine
from insitu.training.plan.step import PlanConfig
from insitu.training.start_model import keep_start_model
from insitu.training.weights.files import (
    DeltaPublisher,
    DiskPublisher,
    Publisher,
    PublishOptions,
)
from insitu.training.weights.gpu import TransferPublisher, Way
from insitu.training.weights.reconnect import ReconnectingEngine, RestorablePublisher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything a run needs, live."""

    source: TaskSource
    harness: Harness
    workers: WorkerPool
    gateway: Gateway
    judge: Judge
    learner: Learner
    engine: Engine
    publisher: Publisher
    life: LearnerSupervisor
    plan_config: PlanConfig


TRAINED = ("embedded", "vllm", "sglang")
"""Kinds of engines that take new weights from the trainer."""
WEIGHTS = "weights"
"""Folder of a run directory with published weights."""


@asynccontextmanager
async def _sampled_by(
    run: RunDir, learner: Learner, renderer: ChatRenderer, note: Callable[[str], None]
) -> AsyncIterator[tuple[Engine, Publisher]]:
    """The engine of a run, not yet with the trainer's weights, and what brings them there."""
    table = run.config.engine
    if table.kind == "embedded":
        yield learner.engine, learner
        return
    spool = run.path / WEIGHTS
    options = PublishOptions.of(run.config, spool)
    async with open_server(run.config, renderer, note) as engine:
        publisher: RestorablePublisher
        if isinstance(engine, VllmEngine) and table.publish in ("ipc", "nccl"):
            way: Way = "ipc" if table.publish == "ipc" else "nccl"
            publisher = TransferPublisher(learner, engine, options, way)
        elif table.publish == "delta":
            publisher = DeltaPublisher(learner, engine, options, spool)
        else:
            publisher = DiskPublisher(learner, engine, options)
        max_wait_s, shared = table.reconnect_timeout_s, table.share_gpu
        returning = ReconnectingEngine(
            engine,
            publisher,
            max_wait_s=max_wait_s,
            restarts=run.config.train.restarts,
            share_gpu=shared,
            say=note,
        )
        yield returning, returning


def make_judge(config: Config, backend: SandboxBackend, source: TaskSource) -> TaskJudge:
    """The grading side; the caller closes it. The oracle is made inside and never leaves."""
    grader = Grader(backend, GradeConfig(timeout_s=config.grade.timeout_s, parallel=config.grade.workers))
    reward = reward_function(config, transcript_reader(config))
    return TaskJudge(grader, source, config.grade.min_trust, reward)


def committed(run: RunDir, store: Store) -> Committed:
    """Where the newest committed checkpoint lies, whenever it is asked for."""

    def newest() -> Path | None:
        last = store.last_step()
        return None if last is None else run.path / last.checkpoint

    return newest


def check_trained(config: Config) -> None:
    """Raises ConfigError for an engine that takes no weights."""
    if config.engine.kind not in TRAINED:
        raise ConfigError(
            f"engine.kind {config.engine.kind}: a training run samples with {', '.join(TRAINED)}, which take"
            " its weights and give a log-probability for every sampled token, as losses and corrections need"
        )


def prepare_training(config: Config, say: Callable[[str], None]) -> Prepared:
    """Check a training run before anything of it is started or written. Raises InsituError."""
    own = (check_trained, check_weights, check_reference)
    return prepare(config, say, lambda _, source: examples_of(source), own)


@asynccontextmanager
async def assemble(
    run: RunDir,
    store: Store,
    prepared: Prepared,
    note: Callable[[str], None] = log.warning,
    stage: Callable[[str], None] = log.info,
) -> AsyncIterator[RunParts]:
    """All parts of a run, from the last committed checkpoint if there is one. Raises RecordError when the
    start model is not the one that the run began with."""
    remove_stale_scratch()
    config, source, renderer = run.config, prepared.source, prepared.rules
    async with AsyncExitStack() as stack:
        stage("starting the learner")
        spec = LearnerSpec.of(config, model=model_folder(config), log=run.logs / "learner.log")
        learner = await stack.enter_async_context(Learner.start(spec))
        keep_start_model(store, learner)
        engine, publisher = await stack.enter_async_context(_sampled_by(run, learner, renderer, note))
        life = LearnerSupervisor(
            learner, publisher, committed(run, store), restarts=config.train.restarts, say=note
        )
        await life.begin()
        # Unix socket paths are limited to 107 bytes, a run directory may be deep.
        sockets = stack.enter_context(scratch_folder())
        if config.engine.kind == "embedded":
            engine = RetryingEngine(engine, life)
        stage("starting the agents")
        setup = prepared.setup
        agents = await stack.enter_async_context(open_agents(config, renderer, engine, sockets, setup, note))
        judge = make_judge(config, agents.backend, source)
        stack.push_async_callback(judge.close)
        yield RunParts(
            source=source,
            harness=agents.harness,
            workers=agents.workers,
            gateway=agents.gateway,
            judge=judge,
            learner=learner,
            engine=engine,
            publisher=publisher,
            life=life,
            plan_config=PlanConfig.of(config),
        )
