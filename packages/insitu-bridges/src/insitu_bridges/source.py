"""Graded rollouts for a trainer that owns the weights, in the process that runs gateway and agents.

    trainer --next, run--> RolloutSource --> Collector, AttemptExecutor --> store --> groups
    trainer --folder-----> engine.load

It has the parts of a training run without the learner's steps; process.py offers it to other processes. What
is handed over is committed as a step of the run, so its tokens count as trained; the trainer may drop some of
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from insitu.capture.ledger import reassign
from insitu.chat.renderer import ChatRenderer
from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import AttemptRunner, Check, CollectOptions, Phase
from insitu.collect.pending_group import ResumedGroup, ResumeState
from insitu.collect.store_sink import StoreSink
from insitu.config import Config
from insitu.engines.base import PauseMode, Receipt
from insitu.engines.factory import open_server
from insitu.engines.replicas import EngineSet
from insitu.engines.server_command import SERVERS
from insitu.errors import ConfigError
from insitu.runtime.engine import Sampler, open_sampler
from insitu.runtime.preflight import prepare
from insitu.runtime.run import open_agents, open_backend
from insitu.runtime.running import RunningAgents
from insitu.storage.files import write_text
from insitu.storage.open_run import open_run
from insitu.storage.run_dir import REPORT, RunDir
from insitu.storage.score import Score
from insitu.storage.store import Store, add_ledgers
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.tasks.mix import TaskMix
from insitu.types import Group, Ledger, Rollout, Status
from insitu_bridges.process import RolloutBatch, weights_folder
from insitu_bridges.tasks_by_id import TasksById
from insitu_train.alarms import InfraFailureRate
from insitu_train.batch_source import Batches, open_batches
from insitu_train.gauges import write_gauges
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.weights.files import SupportsPublish

log = logging.getLogger(__name__)

ENDLESS = 10**9
"""Batches of a run: the trainer ends it."""


class _FolderWeights:
    """Publishes model folders that another trainer has written."""

    def __init__(self, engine: EngineSet, run_dir: Path, mode: PauseMode) -> None:
        self._engine, self._run_dir, self._mode = engine, run_dir, mode

    async def publish(self, version: int) -> Receipt:
        return await self._engine.load(weights_folder(self._run_dir, version), version, mode=self._mode)


class _Sampling:
    """Opens the engine; `publisher` brings weights into it where it takes any."""

    publisher: SupportsPublish | None = None

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @asynccontextmanager
    async def open(
        self, config: Config, renderer: ChatRenderer, log: Path, announce: Callable[[str], None]
    ) -> AsyncIterator[Sampler]:
        if config.engine.kind in ("embedded", *SERVERS):
            async with open_server(config, renderer, announce, output=log) as servers:
                self.publisher = _FolderWeights(servers, self._run_dir, config.engine.pause_mode)
                yield Sampler(engine=servers, check=servers.check)
        else:
            async with open_sampler(config, renderer, log, announce) as sampler:
                yield sampler


class _SilentObserver:
    """Implements `collect.options.RolloutObserver`."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


class RolloutSource:
    """Rollouts on demand; use `open_rollout_source`."""

    def __init__(
        self,
        run: RunDir,
        store: Store,
        source: TaskMix,
        runtime: RunningAgents,
        publisher: SupportsPublish | None,
        check: Check,
    ) -> None:
        """Use the running parts of a run."""
        self.run_dir = run.path
        self._config, self._store, self._source, self._publisher = run.config, store, source, publisher
        self._attempts: AttemptRunner = runtime.attempts(run)
        self._check = check
        collect = run.config.collect
        self._sink = StoreSink(store, InfraFailureRate(run.config.run.alarms["infra_failure"]))
        self._breaker = Breaker(collect.max_consecutive_failures)
        self._plan = PlanConfig.of(run.config)
        self._tasks = TasksById(source)
        self._version = 0
        self._batches: Batches | None = None
        self._wishes: asyncio.Queue[asyncio.Future[RolloutBatch]] = asyncio.Queue()
        self._collecting: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ rollouts

    async def run(self, task: str, key: int, *, evaluation: bool = False) -> Rollout:
        """Run and grade the task with this id; failures of the host are retried.

        `key` names the rollout: its random stream depends on it, and a key that was run before returns the
        stored rollout. `evaluation`: it is not trained. Raises TaskError for an unknown task, and what ends
        the run.
        """
        found = self._tasks.find(task)
        phase: Phase = "eval_during" if evaluation else "train"
        # Steps of batches begin at 1.
        place = {"phase": phase, "first_step": 0, "groups": ENDLESS, "total": 1, "group_size": 1}
        options = CollectOptions.of(self._config, max_staleness=0, group_deadline_s=0.0, **place)
        slots = options.slots(key)
        name = slots[0].rollout_id
        self._sink.plan(slots, found.id, self._version)
        state = self._store.state(name)
        decided = state is not None and state.state not in ("planned", "running")
        draw = ResumedGroup(
            number=key,
            task=found,
            rollouts={name: self._store.rollout(name)} if decided else {},
            tried=self._store.tried(name),
        )
        collector = Collector(
            self._attempts, self._sink, _SilentObserver(), self._breaker, options, lambda number: found,
            check=self._check, version=self._version, resume=ResumeState(draws=[draw], next_draw=key + 1),
        )  # fmt: skip
        async with collector.open():
            [group] = (await collector.next_batch()).groups
        [rollout] = group.rollouts
        if not (decided or evaluation):
            self._hand_over((group,), planned=False)
        return rollout

    async def next(self) -> RolloutBatch:
        """Return the next `collect.groups_per_step` groups; asking is what lets the collector go on.

        Raises what ends the run.
        """
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect())
        wish: asyncio.Future[RolloutBatch] = asyncio.get_running_loop().create_future()
        self._wishes.put_nowait(wish)
        try:
            waited: set[asyncio.Future[Any]] = {wish, self._collecting}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            wish.cancel()
            raise
        if not wish.done():
            self._collecting.result()
        return wish.result()

    async def batches(self) -> AsyncIterator[RolloutBatch]:
        """Yield batches without end."""
        while True:
            yield await self.next()

    # ------------------------------------------------------------------ weights

    def pause(self, version: int) -> None:
        """Start no attempt until `version` is in the engine; groups that will be too old are dropped."""
        if self._batches is not None:
            self._batches.pending(version)

    async def load(self, version: int) -> None:
        """Load the weights that were written to `weights_folder(run_dir, version)`.

        Raises ConfigError for an engine that takes none, EngineError.
        """
        if self._publisher is None:
            raise ConfigError(f"engine.kind {self._config.engine.kind} takes no weights from a bridge")
        await self._publisher.publish(version)

    def version(self, version: int) -> None:
        """Handle a version that the trainer has brought into the engine."""
        self._version = version
        if self._batches is not None:
            self._batches.published(version)

    async def close(self) -> None:
        """Stop collecting: running agents and their sandboxes end."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.wait({self._collecting})

    # ------------------------------------------------------------------ inside

    async def _collect(self) -> None:
        table = self._config.run.model_copy(update={"steps": ENDLESS})
        endless = self._config.model_copy(update={"run": table})
        opened = open_batches(
            endless, self._store, self._source, self._attempts, self._sink, _SilentObserver(), self._breaker,
            check=self._check, warn=log.warning, version=self._version,
        )  # fmt: skip
        async with opened as batches:
            self._batches = batches
            # Cancelled by `close`: what was collected and not handed over is then recorded as unused.
            with contextlib.suppress(asyncio.CancelledError):
                while True:
                    await self._grant(batches)

    async def _grant(self, batches: Batches) -> None:
        """Collect groups for the next wish."""
        wish = await self._wishes.get()
        groups, _ = await batches.next()
        while not groups:  # all places of this version are taken, and the trainer wants more
            batches.published(self._version)
            groups, _ = await batches.next()
        while wish.done():  # cancelled meanwhile: the groups are for the next one
            wish = await self._wishes.get()
        wish.set_result(self._hand_over(tuple(groups), planned=True))

    def _hand_over(self, groups: tuple[Group, ...], *, planned: bool) -> RolloutBatch:
        """Commit groups as a step. planned: with insitu's own advantages, else with those of the trainer."""
        last = self._store.last_step()
        step = 1 if last is None else last.step + 1
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._store.assign(step, [r.id for r in rollouts if r.status is not Status.INFRA_FAILED])
        if planned:
            plan = plan_step(groups, self._plan)
            reasons, digest, ledger = plan.exclusion_reasons, plan.digest, plan.ledger
        else:
            reasons, digest = {r.id: _unscored(r) for r in rollouts}, ""
            ledgers = [(r.trajectory.ledger, reasons[r.id]) for r in rollouts]
            ledger = add_ledgers([reassign(each, why) if why else each for each, why in ledgers])
        self._store.commit_step(
            step,
            _metrics(groups, ledger, self._version),
            "",
            digest,
            ledger,
            trained=[name for name, reason in reasons.items() if not reason],
            discarded={name: reason for name, reason in reasons.items() if reason},
        )
        return RolloutBatch(step=step, version=self._version, groups=groups)


def _unscored(rollout: Rollout) -> str:
    """Return why a trainer with its own advantages cannot train a rollout, or empty."""
    if rollout.status is Status.INFRA_FAILED:
        return "infra"
    return "ungraded" if rollout.reward is None else ""


def _metrics(groups: Sequence[Group], ledger: Ledger, version: int) -> Mapping[str, Any]:
    score = Score.of([r for g in groups for r in g.rewards])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "version": version,
        "solve_rate": score.rate if score.total else None,
        "reward_mean": score.reward_mean if score.total else None,
        "groups": len(groups),
        "rollouts": len(rollouts),
        "tokens_sampled": ledger.captured,
        "tokens_trained": ledger.trained,
    }


@asynccontextmanager
async def open_rollout_source(config: Config) -> AsyncIterator[RolloutSource]:
    """Open gateway, agents, engine and a new run directory. Raises InsituError."""
    note = log.warning
    prepared = prepare(config, note, lambda _, mix: mix.examples())
    renderer = prepared.rules
    remove_stale_scratch()
    async with AsyncExitStack() as stack:
        run, store = stack.enter_context(open_run("bridge", config))
        sampling = _Sampling(run.path)
        opened = await stack.enter_async_context(open_backend(run, renderer, note, sampling.open))
        runtime = await stack.enter_async_context(
            open_agents(config, opened.backend, opened.engine, prepared.source, prepared.setups, note)
        )
        gauges = write_gauges(run.timeline(), store, runtime.open_sessions, runtime.gauges)
        await stack.enter_async_context(gauges)
        source = RolloutSource(run, store, prepared.source, runtime, sampling.publisher, opened.check)
        try:
            yield source
        finally:
            await source.close()
            _report(run, store)


def _report(run: RunDir, store: Store) -> None:
    """Write summary.json and report.txt of the ended run."""
    last, tokens = store.last_step(), store.check_balance().tokens
    steps = 0 if last is None else last.step
    summary = {"steps": steps, "rollouts": sum(store.phases().values()), "ledger": asdict(tokens)}
    text = f"{summary['rollouts']} rollouts, {steps} times handed over; {tokens.trained} tokens for training"
    write_text(run.path / REPORT, text + "\n")
    run.write_summary(summary)
