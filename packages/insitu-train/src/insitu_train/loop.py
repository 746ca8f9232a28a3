"""The training loop in the controller: collect, plan, step, commit, publish, checkpoint, repeat.

    Batches -> groups -> plan_step -> Learner.step -> Store.commit_step -> Publisher -> checkpoint

An evaluation beside a step has ended before the step is committed: a learner that dies meanwhile comes back
with the committed weights, which are those being evaluated.
Rollouts stored before a crash are used after it, and committed steps without a checkpoint are trained again
(recovery.py), so a resumed synchronous run of a scripted agent ends with the same bits.
The start model is outside the run directory, so the run stores its checksum: otherwise a resumed run would
continue from another model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from insitu import failpoint
from insitu.capture.ledger import reassign
from insitu.collect.breaker import Breaker
from insitu.collect.options import AttemptRunner
from insitu.collect.starvation import Activity
from insitu.collect.store_sink import StoreSink
from insitu.engines.base import Engine
from insitu.errors import RecordError, TrainError
from insitu.evaluate.result import EvalResult
from insitu.progress.base import SHOWN, View
from insitu.storage.metrics import MetricsFile
from insitu.storage.open_run import RunKind, kind_of
from insitu.storage.run_dir import RunDir, read_store, read_summary
from insitu.storage.store import Store
from insitu.storage.wall_clock import WallClock
from insitu.tasks.mix import TaskMix
from insitu.types import Ledger, Status
from insitu_train.alarms import IN_A_ROW, CollapseAlarm, InfraFailureRate, StepAlarms, why_untrained
from insitu_train.batch_source import Batches, open_batches
from insitu_train.checkpoints import Checkpoints
from insitu_train.evaluations import (
    EvalParts,
    Evaluations,
    OpenEvaluations,
    evaluations_summary,
    heldout_summary,
)
from insitu_train.learner.client import Learner
from insitu_train.learner.supervisor import LearnerSupervisor, Trained
from insitu_train.options import StepResult, gaps
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.recovery import best_step, heldout_scores
from insitu_train.scores import prune_scores, score_file
from insitu_train.served_batches import ServedBatches
from insitu_train.step_metrics import (
    ahead_summary,
    evaluation_waits,
    mismatch_text,
    service_usage,
    step_metrics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgents:
    """What makes rollouts, running."""

    source: TaskMix
    names: tuple[str, str]
    """Names and versions of the agents."""
    attempts: AttemptRunner
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything that the loop needs, running."""

    agents: RunAgents | None
    """None = the rollouts are stored sessions (`collect.run`)."""
    learner: Learner
    supervisor: LearnerSupervisor
    plan_config: PlanConfig


EXTRA = "summary_extra"
"""Metadata key of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of one invocation that are not in the run's configuration."""

    resume: Path | None = None
    """Run directory to continue."""
    began: float = field(default_factory=time.monotonic)
    """Reading of time.monotonic() at the start of the process."""
    extra: Mapping[str, float | int | str] = field(default_factory=dict)
    """Further numbers for the summary; those of the first invocation are kept on resume."""


def _eval_parts(parts: RunParts) -> EvalParts | None:
    agents = parts.agents
    if agents is None:
        return None
    return EvalParts(
        source=agents.source, attempts=agents.attempts, engine=agents.engine, check=parts.supervisor.check
    )


def _account(plan: StepPlan, result: StepResult) -> tuple[Ledger, Mapping[str, str]]:
    """Return the ledger of a step, and rollout id -> why it is not trained, or empty."""
    reasons = plan.exclusion_reasons
    if result.bad:
        dropped = {name: reason or "bad_step" for name, reason in reasons.items()}
        return reassign(plan.ledger, "bad_step"), dropped
    return reassign(plan.ledger, "mismatch", result.mismatched), reasons


class TrainingLoop:
    """One run, from the store's state to its end."""

    def __init__(
        self,
        run: RunDir,
        store: Store,
        metrics: MetricsFile,
        parts: RunParts,
        view: View,
        clock: WallClock,
    ) -> None:
        self._run, self._store, self._metrics, self._parts, self._view = run, store, metrics, parts, view
        self._clock = clock
        self._timeline = run.timeline()
        self._closed: float | None = None
        """Reading of time.monotonic() at the last commit in this process."""
        c = run.config
        masks = InfraFailureRate(c.run.alarms["infra_failure"])
        committed = store.steps()
        self._alarms = StepAlarms(c.run.alarms, masks, committed, c.agent_of)
        self._collapse = CollapseAlarm(c.run.alarms["collapse"], (step.metrics for step in committed))
        self._sink = StoreSink(store, masks)
        self._checkpoints = Checkpoints(run, store, parts.supervisor, view.note)
        self._breaker = Breaker(c.collect.max_consecutive_failures)
        self._activity = Activity()
        self._evaluations = Evaluations(
            run, store, metrics, view, self._breaker, self._activity, _eval_parts(parts)
        )

    async def run(self) -> Mapping[str, Any]:
        """Run the remaining steps; return the summary without the time."""
        last = self._store.last_step()
        first = 1 if last is None else last.step + 1
        c = self._run.config
        left = c.run.steps - first + 1
        per_step = c.collect.groups_per_step * c.collect.group_size if self._parts.agents else 0
        title = f"{' '.join(self._agent()).rstrip()}, seed {c.run.seed}"
        evals = self._evaluations
        during = sum(evals.rollouts(step) for step in range(first - 1, c.run.steps))
        self._view.begin(title, left * per_step + 2 * evals.rollouts() + during)
        before = await evals.run("before", 0)
        async with self._batches() as batches:
            for step in range(first, c.run.steps + 1):
                # before the next step, so that a resumed run finishes an interrupted evaluation first
                await evals.run("during", step - 1)
                if self._stops(step - 1 - c.eval[0].beside_training):
                    break
                await self._step(step, batches)
        last = self._store.last_step()
        after = await evals.run("after", 0 if last is None else last.step)
        await self._checkpoints.finish()
        return self._summary(before, after)

    def _agent(self) -> tuple[str, str]:
        """Return name and version of the agents that made the rollouts."""
        agents = self._parts.agents
        if agents is None:
            return f"sessions of {self._run.config.collect.run}", ""
        return agents.names

    def _batches(self) -> AbstractAsyncContextManager[Batches]:
        """Yield the source of groups until the last step."""
        c, parts = self._run.config, self._parts
        if parts.agents is None:
            return nullcontext(ServedBatches(c, self._store, self._sink, self._view))
        return open_batches(
            c,
            self._store,
            parts.agents.source,
            parts.agents.attempts,
            self._sink,
            self._view,
            self._breaker,
            check=parts.supervisor.check,
            warn=self._view.note,
            version=parts.learner.version,
            activity=self._activity,
        )

    def _stops(self, step: int) -> bool:
        """Return whether the result after this step ends the run: it has not improved for too long."""
        limit, heldout = self._run.config.run.stop_after_evals, self._run.config.eval[0]
        if not limit or not heldout.due(step):
            return False
        # without the evaluations after training: of this step, before a resume, or before steps were added
        found = heldout_scores(self._store).items()
        scores = {at: score for at, score in found if at <= step and (heldout.due(at) or not at)}
        best = max(scores, key=lambda at: (scores[at], -at), default=step)
        since = sum(at > best for at in scores)
        if since < limit:
            return False
        self._view.note(
            f"step {step}: the run ends: {since} evaluations without a better held-out result than that after"
            f" step {best} (run.stop_after_evals)"
        )
        return True

    async def _step(self, step: int, batches: Batches) -> None:
        batches.draw()
        async with self._evaluations.beside(step - 1) as beside:
            trained, metrics = await self._train(step, batches, beside)
        await self._publish(step, batches, trained, metrics)

    async def _train(
        self, step: int, batches: Batches, beside: OpenEvaluations
    ) -> tuple[Trained, dict[str, Any]]:
        """Collect, train and commit a step; return it with its metrics."""
        c = self._run.config
        began = time.monotonic()
        rollouts = batches.rollouts and batches.rollouts + beside.rollouts
        self._view.stage(f"step {step} of {c.run.steps}{beside.shown}", rollouts)
        with self._timeline.phase("collect", step):
            groups, collected_metrics = await batches.next()
        collected = time.monotonic()
        graded = [r.id for g in groups for r in g.rollouts if r.status is not Status.INFRA_FAILED]
        plan = plan_step(groups, self._parts.plan_config)
        self._store.assign(step, graded)
        with self._timeline.phase("train", step):
            scores = None if c.record.scores == "off" else score_file(self._run.scores, step)
            trained = await self._parts.supervisor.train(plan, scores)
        result = trained.result
        ledger, reasons = _account(plan, result)
        taken = [name for name, reason in reasons.items() if not reason]
        metrics = step_metrics(groups, ledger, result, () if result.skipped else taken)
        metrics |= {
            "collect_s": collected - began,
            "train_s": time.monotonic() - collected,
            **collected_metrics,
        }
        watched, alarms = self._alarms.look(groups, ledger, metrics["reward_mean"])
        metrics |= watched
        untrained = why_untrained(groups, result.skipped)
        alarms += self._collapse.look(metrics)
        for alarm in filter(None, (untrained, *alarms, result.alarm, mismatch_text(result.mismatched))):
            self._view.note(f"step {step}: {alarm}")
        metrics |= await beside.finish()
        metrics["step_s"] = (now := time.monotonic()) - began
        # includes publication and evaluation since the previous step
        metrics["cycle_s"] = now - (began if self._closed is None else self._closed)
        self._closed = now
        metrics |= {"weights": trained.weights, "learner_restarts": self._parts.supervisor.restarts}
        self._store.commit_step(
            step,
            metrics,
            self._checkpoints.name(step),
            plan.digest,
            ledger,
            trained=taken,
            discarded={name: reason for name, reason in reasons.items() if reason},
            meta=self._clock.meta(),
        )
        failpoint.hit("loop.committed")
        self._check_bad_steps(result)
        return trained, metrics

    async def _publish(self, step: int, batches: Batches, trained: Trained, metrics: dict[str, Any]) -> None:
        """Publish a committed step, save it if a checkpoint is due, and report it."""
        c, result = self._run.config, trained.result
        if not result.skipped:
            batches.pending(result.version)
        publishing = time.monotonic()
        with self._timeline.phase("publish", step):
            await self._parts.supervisor.publish(trained)
        metrics["publish_s"] = time.monotonic() - publishing
        failpoint.hit("loop.published")
        batches.published(result.version)
        metrics["checkpoint_s"] = await self._checkpoints.after(step)
        self._metrics.write({"event": "step", "step": step, **metrics})
        self._view.step_done(
            step, c.run.steps, {name: metrics[name] for name in SHOWN if metrics.get(name) is not None}
        )
        prune_scores(self._run.scores, step, c.record.steps_kept)
        failpoint.hit("loop.pruned")

    def _check_bad_steps(self, result: StepResult) -> None:
        """Raise TrainError when too many were refused since the last update, also before a resume."""
        since = takewhile(lambda record: record.metrics["skipped"], reversed(self._store.steps()))
        count = sum(record.metrics["bad"] for record in since)
        if result.bad and count >= IN_A_ROW:
            raise TrainError(f"{count} steps since the last update were refused, the last: {result.skipped}")

    def _summary(
        self, before: Mapping[str, EvalResult], after: Mapping[str, EvalResult]
    ) -> Mapping[str, Any]:
        steps, counts = self._store.steps(), self._store.phases()
        first = self._run.config.eval[0].name
        best = best_step(self._store, [step.step for step in steps])
        agent, version = self._agent()
        return {
            **heldout_summary("before", before.get(first)),
            **heldout_summary("after", after.get(first)),
            "heldout_tasks": len(after[first].tasks) if first in after else 0,
            "evaluations": evaluations_summary(before, after),
            "best_step": best,
            "best_heldout_reward": None if best is None else round(heldout_scores(self._store)[best], 4),
            "stopped_early": len(steps) < self._run.config.run.steps,
            "rl_steps": len(steps),
            "updates": sum(not step.metrics["skipped"] for step in steps),
            "rollouts": sum(counts.values()),
            "agent": agent,
            "agent_version": version,
            **gaps([step.metrics for step in steps]),
            "ledger": asdict(self._store.ledger()),
            "attempts_by_end": self._store.attempts_by_end(),
            "seed": self._run.config.run.seed,
            "weights": self._parts.learner.weights,
            "run_dir": str(self._run.path),
            **ahead_summary([step.metrics for step in steps]),
            **evaluation_waits([step.metrics for step in steps]),
            **service_usage(self._run.config, self._store),
        }


def finished_run(path: Path, say: Callable[[str], None], kind: RunKind = "train") -> Mapping[str, Any] | None:
    """Return the summary of a finished run of this kind, with a notice; None otherwise.

    Raises RecordError.
    """
    summary = read_summary(path)
    if summary is None:
        return None
    with read_store(path) as store:
        if kind_of(store) != kind:
            return None
    say(f"{path} is finished, nothing to do")
    return summary


START_MODEL = "start_model"
"""Metadata key: checksum of the weights before the first step."""
REFERENCE = "reference"
"""Metadata key: checksum of the reference policy; empty without one."""


def keep_start_model(store: Store, learner: Learner) -> None:
    """Store the checksums of the start weights that `learner` holds and of its reference, or check them."""
    if START_MODEL in store.meta():
        check_start_model(store, learner)
    else:
        store.set_meta(START_MODEL, learner.weights)
        store.set_meta(REFERENCE, learner.reference)
    if store.meta().get(REFERENCE, learner.reference) != learner.reference:
        raise RecordError(
            "another reference policy or teacher than the run began with (train.reference, tasks.reference)"
        )


def check_start_model(store: Store, learner: Learner) -> None:
    """Raise RecordError when an untrained learner holds other weights than the run began with."""
    began, found = store.meta().get(START_MODEL), learner.weights
    if began is not None and began != found:
        raise RecordError(
            f"{learner.model} is not the start model of the run (checksum {found[:12]}, expected"
            f" {began[:12]}): restore it, or set model.path in config.toml to its folder"
        )
