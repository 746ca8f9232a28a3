"""Real rollouts whose engine and grader are made to fail: does the same plan come out?

The script agent in real sandboxes, the embedded engine, the real grader. A call of the engine fails with an
error, or the grader gives no verdict, by a coin that hangs on rollout, try and call: so longer rollouts fail
more often. The collector tries again; the planner plans. Caller: bench.failures.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks._failures_world import Nowhere
from insitu.attempt import AttemptExecutor, AttemptSpec, OnStart, ignore_cancelled, no_wait
from insitu.chat.load import load_renderer
from insitu.collect.breaker import Breaker
from insitu.collect.groups import open_groups
from insitu.collect.options import CollectOptions
from insitu.config import Config, demo_preset, load_config, model_folder
from insitu.engines.base import Engine, Receipt
from insitu.errors import EngineError
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.judge import TaskJudge
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.runtime.run import open_runtime
from insitu.storage.temp_dirs import scratch_folder
from insitu.tasks.factory import open_source
from insitu.types import (
    Generation,
    Group,
    IntArray,
    Outcome,
    RequestKey,
    Rollout,
    SamplingParams,
    Status,
    Task,
    Tree,
    Verdict,
)
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step

RATES = (0.0, 0.05, 0.15)
TASKS = 24
CALLS = 2.25
"""Model calls of one rollout of the script agent, about: a call fails at this part of half the rate."""
_TRY: ContextVar[tuple[str, int]] = ContextVar("try")
"""The rollout and the number of its try that the current task works on."""


@dataclass(slots=True)
class Trouble:
    """Who fails, and what has failed."""

    rate: float
    tries: dict[str, int] = field(default_factory=dict)
    """Rollout -> its current try."""
    failed: Counter[str] = field(default_factory=Counter)
    """engine, grader."""
    first: set[str] = field(default_factory=set)
    """Rollouts whose first try failed."""

    def strikes(self, what: str, chance: float, *place: object) -> bool:
        name = "\0".join(map(str, (what, *place)))
        coin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
        if coin >= chance:
            return False
        self.failed[what] += 1
        return True


class FailingEngine:
    """Passes calls on, or fails them. Implements engines.base.Engine."""

    def __init__(self, inner: Engine, trouble: Trouble) -> None:
        self._inner, self.trouble = inner, trouble
        self.info, self.pause, self.resume = inner.info, inner.pause, inner.resume

    @property
    def receipt(self) -> Receipt:
        return self._inner.receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        attempt = self.trouble.tries[key.rollout_id]
        chance = self.trouble.rate / 2 / CALLS
        if self.trouble.strikes("engine", chance, key.rollout_id, attempt, key.turn):
            raise EngineError("this call was made to fail")
        return await self._inner.generate(ids, params, key)

    async def close(self) -> None:
        """The learner owns what there is."""


class FailingJudge:
    """Judges, or cannot. Implements rollout.Judge and rollout.Forward."""

    def __init__(self, inner: TaskJudge, trouble: Callable[[], Trouble]) -> None:
        self._inner, self._trouble = inner, trouble

    async def __call__(self, task: Task, tree: Tree) -> Verdict:
        trouble = self._trouble()
        if trouble.strikes("grader", trouble.rate / 2, *_TRY.get()):
            why = "this grading was made to fail"
            return Verdict(outcome=Outcome.INFRA, reward=None, trust="strong", reason=why)
        return await self._inner(task, tree)

    async def prepare(self, task: Task) -> None:
        await self._inner.prepare(task)

    async def base(self, task: Task) -> Tree:
        return await self._inner.base(task)


class Reported:
    """Tells engine and judge which try is under way. Implements collect.options.AttemptRunner."""

    def __init__(self, attempts: AttemptExecutor, trouble: Trouble) -> None:
        self._attempts, self._trouble = attempts, trouble

    async def run(
        self,
        spec: AttemptSpec,
        on_start: OnStart,
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        self._trouble.tries[spec.rollout_id] = spec.attempt
        _TRY.set((spec.rollout_id, spec.attempt))
        rollout = await self._attempts.run(spec, on_start, on_cancelled, ready)
        if rollout.status is Status.INFRA_FAILED and spec.attempt == 1:
            self._trouble.first.add(rollout.id)
        return rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything but the trouble."""

    config: Config
    engine: FailingEngine
    attempts: AttemptExecutor
    tasks: Sequence[Task]


@asynccontextmanager
async def _stage(seed: int) -> AsyncIterator[Stage]:
    settings = ["harness.agent=script", "harness.workers=4", f"run.seed={seed}"]
    config = load_config(None, settings, demo_preset())
    folder = model_folder(config)
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        spec = LearnerSpec.of(config, model=folder, log=scratch / "learner.log")
        learner = await stack.enter_async_context(Learner.start(spec))
        await learner.publish(learner.version)
        engine = FailingEngine(learner.engine, Trouble(rate=0.0))
        renderer = load_renderer(folder, config.model.renderer)
        source = open_source(config, limits_of(config), runner_for)
        backend = TokenBackend(engine, renderer)
        agents = await stack.enter_async_context(open_runtime(config, backend, source))
        failing = FailingJudge(agents.judge, lambda: engine.trouble)
        yield Stage(
            config=config,
            engine=engine,
            attempts=AttemptExecutor(agents.gateway, agents.workers, failing),
            tasks=source.tasks("train", 0, TASKS),
        )


async def _collect(stage: Stage, rate: float) -> Sequence[Group]:
    stage.engine.trouble = Trouble(rate=rate)
    c, nowhere = stage.config, Nowhere()
    options = CollectOptions(
        seed=c.run.seed, group_size=c.collect.group_size, attempts=c.collect.attempts, pause_s=0.0
    )
    runner = Reported(stage.attempts, stage.engine.trouble)
    async with open_groups(runner, nowhere, nowhere, Breaker(), options, stage.tasks) as collector:
        return (await collector.next_batch()).groups


async def _real(seed: int) -> list[dict[str, Any]]:
    reported = []
    async with _stage(seed) as stage:
        plan_config = PlanConfig.of(stage.config)
        calm: StepPlan | None = None
        for rate in RATES:
            groups = await _collect(stage, rate)
            plan = plan_step(groups, plan_config)
            calm = calm or plan
            reported.append(_case(rate, groups, stage.engine.trouble, plan, calm, plan_config))
    return reported


def _case(
    rate: float,
    groups: Sequence[Group],
    trouble: Trouble,
    plan: StepPlan,
    calm: StepPlan,
    config: PlanConfig,
) -> dict[str, Any]:
    """What came of one rate. Further tries draw what the first did, so what a habit makes of first tries can
    be inferred from the rollouts that were decided."""
    rollouts = [r for g in groups for r in g.rollouts]
    zeroed = [
        replace(g, rollouts=tuple(replace(r, reward=0.0) if r.id in trouble.first else r for r in g.rollouts))
        for g in groups
    ]
    whole = [g for g in groups if not any(r.id in trouble.first for r in g.rollouts)]
    return {
        "rate": rate,
        "rollouts": len(rollouts),
        "tries": sum(r.attempt for r in rollouts),
        "failed_first": len(trouble.first),
        "failed": dict(trouble.failed),
        "ungraded": sum(r.reward is None for r in rollouts),
        "effective_groups": plan.groups,
        "same_plan": plan.digest == calm.digest,
        "advantages": _differences(plan, calm),
        "reward_0": _differences(plan_step(zeroed, config), calm),
        "drop_group": _differences(plan_step(whole, config), calm),
    }


def _differences(plan: StepPlan, calm: StepPlan) -> dict[str, float | int]:
    """Rollouts trained, missing and added against the run without failures, and the largest and mean
    difference of the advantage over all that either of them trains."""
    ours = {row.rollout_id: row.advantage for row in plan.rows}
    true = {row.rollout_id: row.advantage for row in calm.rows}
    both = sorted(ours.keys() | true.keys())
    gaps = [abs(ours.get(name, 0.0) - true.get(name, 0.0)) for name in both]
    return {
        "trained": len(ours),
        "missing": len(true.keys() - ours.keys()),
        "added": len(ours.keys() - true.keys()),
        "largest": round(max(gaps, default=0.0), 4),
        "mean": round(sum(gaps) / len(gaps), 4) if gaps else 0.0,
    }


def real(seed: int) -> list[dict[str, Any]]:
    """One case for each rate, the first without failures. Raises InsituError."""
    return asyncio.run(_real(seed))
