"""Evaluations of a training run: before it, after steps, after it. Their tokens are never trained.

Every evaluation is a list of tasks with `samples` rollouts each, collected as one synchronous batch at one
policy version and stored under a phase of its own, so a resumed run goes on with an interrupted one.

    after step v:  v published -> collect, train v+1 -> wait for the evaluation -> commit, publish v+1
                        |                                       ^
    beside_training     +-------------- evaluation of v --------+
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import AttemptRunner
from insitu.collect.starvation import Activity
from insitu.config import EvalTable
from insitu.engines.base import Engine
from insitu.errors import ConfigError
from insitu.evaluate.evaluation import Evaluation
from insitu.evaluate.result import EvalResult
from insitu.progress.base import View
from insitu.storage.metrics import MetricsFile
from insitu.storage.pass_at_k import PassAtK, covered, estimate, reported_ks, title
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.tasks.mix import TaskMix
from insitu.types import Group
from insitu_train.alarms import InfraFailureRate
from insitu_train.paired import mean_change
from insitu_train.phases import When, eval_phase
from insitu_train.unparsed import unparsed_counts

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


def result_of(groups: Sequence[Group], samples: int) -> EvalResult:
    """Return what an evaluation found, with the replies with calls that did not parse or of unknown tools."""
    return EvalResult.of({n: group.rollouts for n, group in enumerate(groups)}, samples, unparsed_counts)


def levels(result: EvalResult) -> Mapping[str, PassAtK]:
    """Return avg@k as `solve_rate`, and with several samples `pass_at_K` and `pass_all_K`."""
    tasks = list(result.tasks.values())
    found = {"solve_rate": estimate(tasks, 1)}
    for k in reported_ks(result.samples)[1:]:
        found[f"pass_at_{k}"] = estimate(tasks, k)
        found[f"pass_all_{k}"] = estimate(tasks, k, all_of=True)
    return {name: level for name, level in found.items() if level.tasks}


def counts(result: EvalResult) -> Mapping[str, float | None]:
    """Return the numbers of rollouts, the mean reward, and the replies with bad calls."""
    score = result.score
    mean = score.reward_mean if score.total else None
    return {"solved": score.solved, "total": score.total, "reward_mean": mean, **result.further}


def metrics(result: EvalResult) -> Mapping[str, float | None]:
    """Return the levels with the bounds of their 95 % intervals and the tasks that they are of."""
    found: dict[str, float | None] = {}
    for name, level in levels(result).items():
        found |= {name: level.value, f"{name}_low": level.low, f"{name}_high": level.high}
        found[f"{name}_tasks"] = level.tasks
    return found


def _gain(before: EvalResult, after: EvalResult) -> Mapping[str, float] | None:
    """Return the mean change of the tasks' solve rates with its 95 % interval; None if none is in both."""
    pairs = [
        (before.tasks[name], counts)
        for name, counts in after.tasks.items()
        if counts.graded and name in before.tasks and before.tasks[name].graded
    ]
    change = mean_change(pairs)
    return None if change is None else change.rounded()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalParts:
    """What evaluations work with."""

    source: TaskMix
    attempts: AttemptRunner
    engine: Engine
    check: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenEvaluation:
    """One evaluation whose rollouts run."""

    table: EvalTable
    when: When
    step: int
    version: int
    collector: Collector
    masks: InfraFailureRate


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEvaluations:
    """Evaluations that run beside a step; none is empty."""

    shown: str
    """Text for a view, empty or ", beside ..."."""
    rollouts: int
    finish: Callable[[], Awaitable[Mapping[str, float]]]
    """Waits for their results; returns the step's metric of this wait, nothing without any."""


class Evaluations:
    """Runs the evaluations of [[eval]]; none where no agent runs."""

    def __init__(
        self,
        run: RunDir,
        store: Store,
        metrics: MetricsFile,
        view: View,
        breaker: Breaker,
        activity: Activity,
        parts: EvalParts | None,
    ) -> None:
        """`breaker`, `activity`: those of the whole run."""
        self._run, self._store, self._metrics, self._view = run, store, metrics, view
        self._breaker, self._activity, self._parts = breaker, activity, parts
        self._timeline = run.timeline()
        tables = run.config.eval if parts else ()
        self._tasks = {one.name: parts.source.evaluated(one) for one in tables if parts and one.count}

    def rollouts(self, step: int | None = None) -> int:
        """Return the rollouts of all evaluations, or of those after a step of training."""
        return self._rollouts([one for one in self._run.config.eval if step is None or one.due(step)])

    def _rollouts(self, tables: Sequence[EvalTable]) -> int:
        return sum(one.samples * len(self._tasks.get(one.name, ())) for one in tables)

    async def run(self, when: When, step: int) -> Mapping[str, EvalResult]:
        """Run all evaluations, during training those that are due and block; return their results by name."""
        found = dict[str, EvalResult]()
        for one in self._due(when, step):
            stage = _STAGES[when].format(name=self._shown(one), step=step)
            self._view.stage(stage, self._rollouts([one]))
            with self._timeline.phase("evaluate", step):
                async with self._open(one, when, step) as opened:
                    found[one.name] = await self._finish(opened)
        return found

    def _due(self, when: When, step: int, *, beside: bool = False) -> Sequence[EvalTable]:
        """Return the evaluations to run; during training those that are due, beside it or blocking."""

        def now(table: EvalTable) -> bool:
            return when != "during" or (table.due(step) and table.beside_training == beside)

        return [one for one in self._run.config.eval if self._tasks.get(one.name) and now(one)]

    @asynccontextmanager
    async def beside(self, step: int) -> AsyncIterator[OpenEvaluations]:
        """Run the evaluations after a step that do not block inside the context, which awaits `finish`.

        What ends one of them cancels the body, and the other way round.
        """
        due = self._due("during", step, beside=True)
        names = ", ".join(map(self._shown, due))
        stage = _STAGES["during"].format(name=names, step=step)
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(self._open(one, "during", step)) for one in due]

            async def finish() -> Mapping[str, float]:
                if not opened:
                    return {}
                began = time.monotonic()
                with self._timeline.phase("evaluate", step):
                    for one in opened:
                        await self._finish(one)
                return {"evaluate_s": time.monotonic() - began}

            yield OpenEvaluations(
                shown=f", beside {stage}" if due else "", rollouts=self._rollouts(due), finish=finish
            )

    @asynccontextmanager
    async def _open(self, table: EvalTable, when: When, step: int) -> AsyncIterator[_OpenEvaluation]:
        """Run the rollouts of one evaluation inside the context."""
        config, parts = self._run.config, self._parts
        if parts is None:
            raise ConfigError("no agent runs: nothing can be evaluated")
        masks = InfraFailureRate(config.run.alarms["infra_failure"])
        version = parts.engine.receipt.version
        evaluation = Evaluation(
            phase=self._phase(table, when),
            step=step,
            tasks=self._tasks[table.name],
            samples=table.samples,
            temperature=table.temperature,
        )
        running = evaluation.open(
            config,
            self._store,
            masks,
            parts.attempts,
            self._view,
            self._breaker,
            check=parts.check,
            version=version,
            activity=self._activity,
        )
        async with running as collector:
            yield _OpenEvaluation(
                table=table, when=when, step=step, version=version, collector=collector, masks=masks
            )

    async def _finish(self, one: _OpenEvaluation) -> EvalResult:
        """Wait for the rollouts of an evaluation and report its result."""
        result = result_of((await one.collector.next_batch()).groups, one.table.samples)
        self._report(one, result)
        return result

    def _shown(self, table: EvalTable) -> str:
        return HELDOUT if table is self._run.config.eval[0] else table.name

    def _phase(self, table: EvalTable, when: When) -> str:
        return eval_phase(when, "" if table is self._run.config.eval[0] else table.name)

    def _report(self, one: _OpenEvaluation, result: EvalResult) -> None:
        phase = self._phase(one.table, one.when)
        shown = _SCORES[one.when].format(name=self._shown(one.table), step=one.step)
        score, masked = result.score, one.masks.close_step()
        self._view.eval_done(shown, score)
        for line in masked.lines:
            self._view.note(f"{phase}: {line}")
        found_levels = levels(result)
        if result.samples > 1 and found_levels:
            listed = (
                f"{title(k)} {v.value:.3f} ({v.low:.3f} to {v.high:.3f}{covered(v.tasks, len(result.tasks))})"
                for k, v in found_levels.items()
            )
            self._view.note(f"{shown}: {', '.join(listed)}")
        numbers = {
            **counts(result),
            "tries": masked.tries,
            "masked": masked.masked,
            "version": one.version,
            **metrics(result),
        }
        for name, own in result.sets.items():
            found = {**counts(own), **metrics(own)}
            numbers |= {f"{name}/{metric}": value for metric, value in found.items()}
        self._metrics.write({"event": phase, "step": one.step, **numbers})


def evaluations_summary(
    before: Mapping[str, EvalResult], after: Mapping[str, EvalResult]
) -> Mapping[str, Mapping[str, Any]]:
    """Return what each evaluation found before and after training, and the gain with its interval."""
    found = dict[str, Mapping[str, Any]]()
    for name, last in after.items():
        first = before.get(name)
        found[name] = _compared(first, last)
        if len(last.sets) > 1:
            firsts = first.sets if first else {}
            sets = {one: _compared(firsts.get(one), own) for one, own in last.sets.items()}
            found[name] = {**found[name], "sets": sets}
    return found


def _compared(before: EvalResult | None, after: EvalResult) -> Mapping[str, Any]:
    return {
        "tasks": len(after.tasks),
        "samples": after.samples,
        "before": _rounded(metrics(before)) if before else {},
        "after": _rounded(metrics(after)),
        "gain": _gain(before, after) if before else None,
    }


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
        sets = source.of_eval(table) if table.count else ()
        sizes = [one.size(table.split) for one in sets]
        if not sets or None in sizes:
            continue
        there = sum(size or 0 for size in sizes)
        if table.count > there and (table.count != usual or (table.tasks and not there)):
            names = " + ".join(one.source.name for one in sets)
            raise ConfigError(
                f"eval.{table.name}.count = {table.count}: {names} has {there} tasks in the {table.split}"
                " split (tasks.eval_share); lower the count"
            )
