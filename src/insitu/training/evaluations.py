"""Evaluations of a training run: before it, after steps, after it. Their tokens are never trained.

Every evaluation is a list of tasks with `samples` rollouts each, collected as one synchronous batch at one
policy version and stored under a phase of its own, so a resumed run goes on with an interrupted one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from insitu.collect.breaker import Breaker
from insitu.collect.groups import collect_groups
from insitu.collect.options import AttemptRunner, RolloutObserver
from insitu.config import EvalTable
from insitu.engines.base import Engine
from insitu.errors import ConfigError
from insitu.storage.metrics import MetricsFile
from insitu.storage.pass_at_k import PassAtK, TaskCounts, bootstrap, estimate, reported_ks
from insitu.storage.phases import When, eval_phase
from insitu.storage.run_dir import RunDir
from insitu.storage.score import Score
from insitu.tasks.mix import TaskMix
from insitu.training.alarms import InfraFailureRate
from insitu.training.batch_source import StoreSink, collect_options
from insitu.types import Group

_STAGES: Mapping[When, str] = {
    "before": "{name} tasks before training",
    "during": "{name} tasks after step {step}",
    "after": "{name} tasks after training",
}
_SCORES: Mapping[When, str] = {
    "before": "{name} before",
    "during": "{name} step {step}",
    "after": "{name} after",
}
HELDOUT = "held-out"
"""How the first evaluation is called in a view."""


class EvalObserver(RolloutObserver, Protocol):
    """The view of evaluations."""

    def stage(self, name: str, total: int = 0) -> None: ...

    def eval_done(self, name: str, score: Score) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Graded rollouts of one evaluation at one moment."""

    score: Score
    samples: int
    tasks: Mapping[str, TaskCounts]
    """By group, in order of the tasks."""

    @classmethod
    def of(cls, groups: Sequence[Group], samples: int) -> EvalResult:
        rewards = {group.id.rpartition("/")[2]: group.rewards for group in groups}
        return cls(
            score=Score.of([reward for own in rewards.values() for reward in own]),
            samples=samples,
            tasks={
                name: TaskCounts(graded=len(own), resolved=sum(reward >= 1.0 for reward in own))
                for name, own in rewards.items()
            },
        )

    def levels(self, seed: int) -> Mapping[str, PassAtK]:
        """Return avg@k as `solve_rate`, and with several samples `pass_at_K` and `pass_all_K`."""
        tasks = list(self.tasks.values())
        found = {"solve_rate": estimate(tasks, 1, seed=seed)}
        for k in reported_ks(self.samples)[1:]:
            found[f"pass_at_{k}"] = estimate(tasks, k, seed=seed)
            found[f"pass_all_{k}"] = estimate(tasks, k, seed=seed, all_of=True)
        return {name: level for name, level in found.items() if level.tasks}

    def metrics(self, seed: int) -> Mapping[str, float | None]:
        """Return the levels with the bounds of their 95 % intervals."""
        found: dict[str, float | None] = {}
        for name, level in self.levels(seed).items():
            found |= {name: level.value, f"{name}_low": level.low, f"{name}_high": level.high}
        return found


def _gain(before: EvalResult, after: EvalResult, seed: int) -> Mapping[str, float] | None:
    """Return the mean change of the tasks' solve rates with its 95 % interval; None if none is in both."""
    rates = [
        (before.tasks[name], counts)
        for name, counts in after.tasks.items()
        if counts.graded and name in before.tasks and before.tasks[name].graded
    ]
    if not rates:
        return None
    changes = np.array([b.resolved / b.graded - a.resolved / a.graded for a, b in rates])
    low, high = bootstrap(changes.tolist(), seed)
    return {"value": float(changes.mean()), "low": low, "high": high, "tasks": len(rates)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalParts:
    """What evaluations work with."""

    source: TaskMix
    attempts: AttemptRunner
    engine: Engine
    check: Callable[[], Awaitable[None]]


class Evaluations:
    """Runs the evaluations of [[eval]]; none where no agent runs."""

    def __init__(
        self,
        run: RunDir,
        metrics: MetricsFile,
        sink: StoreSink,
        view: EvalObserver,
        breaker: Breaker,
        masks: InfraFailureRate,
        parts: EvalParts | None,
    ) -> None:
        """`masks`: the failure counts that `sink` keeps of evaluations."""
        self._run, self._metrics, self._sink, self._view, self._breaker = run, metrics, sink, view, breaker
        self._masks, self._parts = masks, parts
        self._timeline = run.timeline()
        tables = run.config.eval if parts else ()
        self._tasks = {one.name: parts.source.evaluated(one) for one in tables if parts and one.count}

    def rollouts(self, step: int | None = None) -> int:
        """Return the rollouts of all evaluations, or of those after a step of training."""
        due = (one for one in self._run.config.eval if step is None or one.due(step))
        return sum(one.samples * len(self._tasks.get(one.name, ())) for one in due)

    async def run(self, when: When, step: int) -> Mapping[str, EvalResult]:
        """Run all evaluations, during training those that are due; return their results by name."""
        tables = self._run.config.eval
        due = [one for one in tables if when != "during" or one.due(step)]
        return {one.name: await self._run_one(one, when, step) for one in due if self._tasks.get(one.name)}

    async def _run_one(self, table: EvalTable, when: When, step: int) -> EvalResult:
        parts, tasks, first = self._parts, self._tasks[table.name], table is self._run.config.eval[0]
        if parts is None:
            raise ConfigError("no agent runs: nothing can be evaluated")
        phase, shown = eval_phase(when, "" if first else table.name), HELDOUT if first else table.name
        self._view.stage(_STAGES[when].format(name=shown, step=step), len(tasks) * table.samples)
        version = parts.engine.receipt.version
        options = collect_options(self._run.config)
        options = options.changed(
            phase=phase,
            first_step=step,
            group_size=table.samples,
            temperature=table.temperature or options.temperature,
            whole=False,
        )
        with self._timeline.phase("evaluate", step):
            groups = await collect_groups(
                parts.attempts,
                self._sink,
                self._view,
                self._breaker,
                options,
                tasks,
                check=parts.check,
                version=version,
            )
        result = EvalResult.of(groups, table.samples)
        self._report(result, phase, _SCORES[when].format(name=shown, step=step), step, version)
        return result

    def _report(self, result: EvalResult, phase: str, shown: str, step: int, version: int) -> None:
        score, masked = result.score, self._masks.close_step()
        self._view.eval_done(shown, score)
        if masked.line:
            self._view.note(f"{phase}: {masked.line}")
        levels = result.levels(self._run.config.run.seed)
        if result.samples > 1 and levels:
            listed = (f"{_title(k)} {v.value:.3f} ({v.low:.3f} to {v.high:.3f})" for k, v in levels.items())
            self._view.note(f"{shown}: {', '.join(listed)}")
        counts = {
            "solved": score.solved,
            "total": score.total,
            "reward_mean": score.reward_mean if score.total else None,
            "tries": masked.tries,
            "masked": masked.masked,
            "version": version,
            **result.metrics(self._run.config.run.seed),
        }
        self._metrics.write({"event": phase, "step": step, **counts})

    def summary(
        self, before: Mapping[str, EvalResult], after: Mapping[str, EvalResult]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return what each evaluation found before and after training, and the gain with its interval."""
        seed, found = self._run.config.run.seed, dict[str, Mapping[str, Any]]()
        for name, last in after.items():
            change = _gain(before[name], last, seed) if name in before else None
            first = _rounded(before[name].metrics(seed)) if name in before else {}
            found[name] = {
                "tasks": len(last.tasks),
                "samples": last.samples,
                "before": first,
                "after": _rounded(last.metrics(seed)),
                "gain": None if change is None else _rounded(change),
            }
        return found


def _title(name: str) -> str:
    """Return pass@4 for pass_at_4, pass^4 for pass_all_4."""
    return name.replace("pass_at_", "pass@").replace("pass_all_", "pass^").replace("solve_rate", "solved")


def _rounded(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in values.items()}


def heldout_summary(when: str, result: EvalResult | None) -> dict[str, float | None]:
    """Return solve rate and mean reward of an evaluation; None where nothing was graded."""
    score = result.score if result is not None and result.score.total else None
    rate, mean = (round(score.rate, 4), round(score.reward_mean, 4)) if score else (None, None)
    return {f"heldout_{when}": rate, f"heldout_reward_{when}": mean}


def check_evaluations(tables: Sequence[EvalTable], source: TaskMix) -> None:
    """Raise ConfigError for an evaluation that asks for more tasks than there are.

    The default of `count` stands for all tasks of a smaller set.
    """
    usual = EvalTable.model_fields["count"].default
    for table in tables:
        sets = source.of_eval(table)
        sizes = [one.size(table.split) for one in sets]
        if not table.count or None in sizes:
            continue
        there = sum(size or 0 for size in sizes)
        if table.count > there and (table.count != usual or (table.tasks and not there)):
            names = " + ".join(one.source.name for one in sets)
            raise ConfigError(
                f"eval.{table.name}.count = {table.count}: {names} has {there} tasks in the {table.split}"
                " split"
            )
