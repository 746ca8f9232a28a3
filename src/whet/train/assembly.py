"""Puts a run together from its configuration: the one place where the parts of the path meet.

    source, backend -> harness -> workers <-sockets- gateway -> family, engine (in the learner)
    grader <- backend                                 learner <- model folder or checkpoint
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from whet.config import Config
from whet.engine.base import Engine
from whet.errors import ConfigError
from whet.gateway.server import Gateway
from whet.grade.clean import GradeConfig, Grader
from whet.harness.base import Harness, ModelAccess
from whet.harness.install import install_pi
from whet.harness.pi import PiHarness
from whet.harness.pool import WorkerPool
from whet.harness.script import AGENT_AT, ScriptHarness
from whet.record.run import RunDir
from whet.record.store import Store
from whet.render.family import Family
from whet.render.template import load_family
from whet.rollout import Judge
from whet.sandbox.base import SandboxBackend
from whet.sandbox.local import LocalBackend
from whet.tasks.toy import ToySource
from whet.train.client import Learner, LearnerSpec
from whet.train.plan import PlanConfig
from whet.types import FileEntry, Limits, Task, Tree, Verdict

WARM_START = Path(__file__).parent.parent / "demo" / "warm_start"
"""The model folder that the package carries."""
SCRIPT_AGENT = Path(__file__).parent.parent / "demo" / "script_agent.py"
"""The agent of `harness.agent = "script"`: one file, standard library only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """The agent's side of the path: where rollouts run and whom they talk to."""

    gateway: Gateway
    workers: WorkerPool
    harness: Harness
    backend: SandboxBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a run needs, live."""

    source: ToySource
    harness: Harness
    workers: WorkerPool
    gateway: Gateway
    judge: Judge
    learner: Learner
    plan_config: PlanConfig


def model_folder(config: Config) -> Path:
    """Where the initial weights, the tokenizer and the template are. Raises ConfigError."""
    folder = Path(config.model.path) if config.model.path else WARM_START
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"model.path: {folder} is not a model folder: it has no tokenizer.json")
    return folder


def limits_of(config: Config) -> Limits:
    return Limits(
        wall_s=config.limits.wall_s,
        max_calls=config.limits.max_calls,
        max_call_tokens=config.limits.max_call_tokens,
        max_session_tokens=config.limits.max_session_tokens,
        max_context_tokens=config.model.max_context_tokens,
    )


def make_harness(config: Config, backend: SandboxBackend) -> Harness:
    """The configured agent, installed when it is missing. Raises SetupError."""
    if config.harness.agent == "script":
        content = SCRIPT_AGENT.read_bytes()
        return ScriptHarness(
            ["python3", "-S", "-E", f"{AGENT_AT}/{SCRIPT_AGENT.name}"],
            {SCRIPT_AGENT.name: FileEntry(content=content)},
            backend,
            version=hashlib.sha256(content).hexdigest()[:12],
            warm=config.harness.mode == "warm",
        )
    access = ModelAccess(public_id="", secret="", max_call_tokens=config.limits.max_call_tokens)
    return PiHarness(
        install_pi(),
        "rpc" if config.harness.mode == "warm" else "fresh",
        backend,
        rollouts_per_process=config.harness.recycle_rollouts,
        model=access,
    )


@asynccontextmanager
async def open_agents(
    config: Config, family: Family, engine: Engine, sockets: Path
) -> AsyncIterator[Agents]:
    """Gateway, workers and their sockets, for as long as the context lasts."""
    backend = LocalBackend(config.sandbox.mode)
    harness = make_harness(config, backend)
    size = config.harness.workers
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway(engine, family))
        # Two per worker: a worker that is being replaced may still hold its socket.
        paths = [sockets / f"g{i}" for i in range(2 * size)]
        for path in paths:
            await stack.enter_async_context(gateway.listen_unix(path))
        if config.gateway.port:
            await stack.enter_async_context(gateway.listen_tcp(port=config.gateway.port))
        strict = config.harness.mode == "fresh"
        ring = itertools.cycle(paths)
        workers = await stack.enter_async_context(
            WorkerPool(harness, size, lambda: next(ring), strict=strict)
        )
        if not strict:
            await workers.warm()
        yield Agents(gateway=gateway, workers=workers, harness=harness, backend=backend)


def make_judge(config: Config, backend: SandboxBackend, source: ToySource) -> Judge:
    """The grading side. The oracle is made inside and never leaves."""
    grader = Grader(backend, GradeConfig(timeout_s=config.grade.timeout_s, parallel=config.grade.workers))

    async def judge(task: Task, tree: Tree) -> Verdict:
        return await grader.grade(task, source.oracle(task), tree)

    return judge


@asynccontextmanager
async def assemble(run: RunDir, store: Store) -> AsyncIterator[Parts]:
    """All parts of a run, from the last committed checkpoint if there is one."""
    config = run.config
    folder = model_folder(config)
    family = load_family(folder)
    last = store.last_step()
    source = ToySource(limits_of(config), seed=config.run.seed, families=config.tasks.families)
    async with AsyncExitStack() as stack:
        spec = LearnerSpec.of(config, model=folder, log=run.logs / "learner.log")
        learner = await stack.enter_async_context(Learner.start(spec))
        if last is not None:
            await learner.load(run.path / last.checkpoint)
        # Unix socket paths are limited to 107 bytes, a run directory may be deep.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"whet-{os.getpid()}-")))
        agents = await stack.enter_async_context(open_agents(config, family, learner.engine, sockets))
        yield Parts(
            source=source,
            harness=agents.harness,
            workers=agents.workers,
            gateway=agents.gateway,
            judge=make_judge(config, agents.backend, source),
            learner=learner,
            plan_config=PlanConfig.of(config),
        )
