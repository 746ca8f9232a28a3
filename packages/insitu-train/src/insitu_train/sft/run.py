"""`insitu sft RUN`: supervised training on the rollouts of a run directory.

    RUN's store -> choose -> schedule -> plan_examples -> Learner.step -> checkpoint (rename) -> commit_step

Writes its own run directory; RUN is only read. Learner, rows, head and checkpoints are those of `insitu
train`, so a checkpoint is a model.path there; adapters are merged at the end. The selection is stored before
the first step, so a resumed run ends with the same bits.
Which examples form a step depends on seed, epoch and ids alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer, forgotten_before
from insitu.config import Config, model_folder
from insitu.config.training import LossConfig, RowRules
from insitu.errors import RecordError, TrainError
from insitu.progress.base import View
from insitu.runtime.trackers import check_trackers, start_trackers
from insitu.storage.files import write_text
from insitu.storage.metrics import MetricsFile
from insitu.storage.open_run import open_run
from insitu.storage.run_dir import REPORT, SESSIONS, RunDir, read_config, read_store, restore_steps
from insitu.storage.store import Store
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.storage.wall_clock import WallClock
from insitu.types import Ledger
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec, require_learner, say_hosts
from insitu_train.loop import (
    TrainOptions,
    finished_run,
    keep_start_model,
)
from insitu_train.options import StepResult, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, cut_row, pack_rows, plan_digest
from insitu_train.recovery import prune
from insitu_train.served_batches import check_tokens
from insitu_train.sft.selection import (
    Selection,
    SelectionRules,
    SftExample,
    Tokens,
    choose,
    distilled_tokens,
    explain,
    stored_tokens,
)
from insitu_train.weights.files import ExportRequest


def schedule(ids: Sequence[str], *, per_step: int, epochs: int, seed: int) -> list[tuple[int, ...]]:
    """Return indices into `ids` for every step; each epoch has each index once, in its own order."""
    steps: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        keys = [hashlib.sha256(f"{seed}\0{epoch}\0{name}".encode()).digest() for name in ids]
        order = sorted(range(len(ids)), key=lambda i: keys[i])
        steps += [tuple(order[at : at + per_step]) for at in range(0, len(order), per_step)]
    return steps


def plan_examples(examples: Sequence[SftExample], config: PlanConfig) -> StepPlan:
    """Plan one step over `examples`. Raises TrainError for a token that cannot be a target."""
    tokens = sum(example.tokens for example in examples)
    if not tokens:
        raise TrainError("a supervised step has no token to train")
    weight = 1.0 / sum(example.counted for example in examples)
    rows = tuple(
        cut_row(example.task_id, example.rollout_id, segment, 1.0, weight)
        for example in examples
        for segment in example.segments
        if segment.mask.any()
    )
    plan = StepPlan(
        rows=rows,
        batches=pack_rows(rows, config),
        ledger=Ledger(captured=tokens, trained=tokens),
        groups=len({example.task_id for example in examples}),
    )
    return replace(plan, digest=plan_digest(plan))


LESSONS, CHOICE = "lessons", "choice"
"""Metadata keys: the selection as [rollout id, digest] in order, and its description."""
MODEL = "model"
"""Folder of a run directory with the whole model, where checkpoints hold adapters."""


SHOWN = ("loss", "grad_norm", "lr", "tokens", "rows")
"""Metrics of a step for the view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """All steps of a run."""

    lessons: tuple[SftExample, ...] = field(repr=False)
    steps: tuple[tuple[int, ...], ...] = field(repr=False)
    """Indices of lessons, per step."""
    words: str
    """Description of the selection."""
    plan: PlanConfig
    """How a step is divided into micro-batches."""


def train_config(config: Config, steps: int) -> TrainConfig:
    """Return the learner's configuration: [train], of which no row of reinforcement learning is left.

    The warm-up is shorter than the run, whose rate would never be reached otherwise.
    """
    base = TrainConfig.of(config)
    optim = base.optim.changed(
        warmup_steps=min(config.train.warmup_steps, max(0, steps - 1)),
        total_steps=0 if config.train.decay == "constant" else steps,
    )
    return base.changed(
        optim=optim,
        loss=LossConfig(loss="nll"),
        epochs=1,
        on_bad_step="stop",
        temperature=1.0,
        reference="",
        references={},
    )


def open_tokens(config: Config, store: Store, renderer: ChatRenderer) -> Tokens:
    """Return the token source of RUN's rollouts: its store, or a provider's recorded text.

    Raises ConfigError when they are not this model's tokens.
    """
    source = read_config(Path(config.sft.run))
    if source.engine.kind == "upstream":
        dropped = bool(forgotten_before(renderer, config.model.keep_reasoning))
        return distilled_tokens(Path(config.sft.run) / SESSIONS, renderer, drop_reasoning=dropped)
    check_tokens(config, Path(config.sft.run), renderer)
    return stored_tokens(store)


def _lessons(config: Config, run_store: Store, renderer: ChatRenderer) -> tuple[tuple[SftExample, ...], str]:
    """Select now, or, in a resumed run, load the stored selection. Raises RecordError, TrainError."""
    source = read_config(Path(config.sft.run))
    with read_store(Path(config.sft.run)) as store:
        tokens = open_tokens(config, store, renderer)
        held = run_store.meta()
        if LESSONS in held:
            return _again(config, store, tokens, json.loads(held[LESSONS])), held[CHOICE]
        choice = choose(
            store, SelectionRules.of(config), tokens, rollouts_held_out=source.rollout.split == "eval"
        )
    words = explain(choice)
    _check(config, choice, words, renderer)
    run_store.set_meta(CHOICE, words)
    run_store.set_meta(LESSONS, json.dumps([[x.rollout_id, x.digest] for x in choice.lessons]))
    return choice.lessons, words


def _check(config: Config, choice: Selection, words: str, renderer: ChatRenderer) -> None:
    if not choice.lessons:
        raise TrainError(f"no rollout of {config.sft.run} was selected: {words}")
    for lesson in choice.lessons:
        for s in lesson.segments:
            if int(s.ids.max()) >= renderer.vocab_size:
                raise TrainError(
                    f"rollout {lesson.rollout_id} segment {s.index} has token {int(s.ids.max())}, beyond"
                    f" the vocabulary of {renderer.vocab_size}"
                )


def _again(
    config: Config, store: Store, tokens: Tokens, chosen: Sequence[Sequence[str]]
) -> tuple[SftExample, ...]:
    """Return the stored selection. Raises RecordError when a rollout is missing or has changed."""
    lessons, rules = [], config.train.pick(RowRules)
    for rollout_id, digest in chosen:
        rollout = store.rollout(rollout_id)
        reward = rollout.reward or 0.0
        lesson = SftExample.of(rollout_id, rollout.task_id, reward, tokens(rollout_id), rules)
        if lesson.digest != digest:
            raise RecordError(f"rollout {rollout_id} of {config.sft.run} has changed since this run began")
        lessons.append(lesson)
    return tuple(lessons)


def _course(config: Config, run_store: Store, renderer: ChatRenderer) -> _Course:
    lessons, words = _lessons(config, run_store, renderer)
    table = config.sft
    steps = schedule(
        [x.rollout_id for x in lessons],
        per_step=table.rollouts_per_step,
        epochs=config.train.epochs,
        seed=config.run.seed,
    )
    return _Course(lessons=lessons, steps=tuple(steps), words=words, plan=PlanConfig.of(config))


class _Steps:
    """The steps of one run, from the store's state to the last."""

    def __init__(self, run: RunDir, store: Store, metrics: MetricsFile, learner: Learner, view: View) -> None:
        self._run, self._store, self._metrics, self._learner = run, store, metrics, learner
        self._view = view

    async def run(self, course: _Course, clock: WallClock) -> None:
        config = self._run.config
        last = self._store.last_step()
        count = len(course.steps)
        for step in range(1 if last is None else last.step + 1, count + 1):
            lessons = [course.lessons[i] for i in course.steps[step - 1]]
            plan = plan_examples(lessons, course.plan)
            result = await self._learner.step(plan)
            metrics = _metrics(result, step, lessons)
            if step % config.run.checkpoint_every_steps == 0 or step == count:
                await self._commit(step, metrics, plan.digest, clock)
            self._metrics.write({"event": "step", "step": step, **metrics})
            self._view.step_done(step, count, {name: metrics[name] for name in SHOWN})
            self._view.advance(step)

    async def _commit(self, step: int, metrics: dict[str, Any], digest: str, clock: WallClock) -> None:
        """Save and commit a step; the ledger is empty, since this run sampled no tokens."""
        folder = self._run.checkpoints / f"step-{step:05d}"
        await self._learner.save(folder)
        if failed := await self._learner.written():
            raise TrainError(failed)
        metrics["weights"] = self._learner.weights
        where = str(folder.relative_to(self._run.path))
        self._store.commit_step(step, metrics, where, digest, Ledger(), meta=clock.meta())
        prune(self._run.checkpoints, self._run.config.run.keep_checkpoints)


def _metrics(result: StepResult, step: int, lessons: Sequence[SftExample]) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "entropy": result.entropy,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.tokens,
        "rows": result.rows,
        "micro_batches": result.micro_batches,
        "rollouts": len(lessons),
        "tasks": len({x.task_id for x in lessons}),
        "step_s": result.seconds,
    }


async def run_sft(config: Config, view: View, options: TrainOptions) -> Mapping[str, Any]:
    """Run or continue to the end; return the content of summary.json. Raises InsituError."""
    resume = options.resume
    if resume is not None and (summary := finished_run(resume, view.note, "sft")) is not None:
        return summary
    check_trackers(config)
    require_learner(config)
    remove_stale_scratch()
    async with AsyncExitStack() as stack:
        run, store = stack.enter_context(open_run("sft", config, resume))
        metrics = stack.enter_context(run.metrics())
        restore_steps(run, store, metrics)
        clock = WallClock(store, options.began)
        folder = model_folder(run.config)
        view.note(f"run directory {run.path}")
        start_trackers(run.path, run.config, view.note)
        course = _course(run.config, store, load_renderer(folder, run.config.model.renderer))
        view.note(course.words)
        if len(course.steps) <= run.config.train.warmup_steps:
            view.note(f"the warm-up ends before the last of {len(course.steps)} steps (train.warmup_steps)")
        spec = LearnerSpec.of(run.config, model=folder, log=run.logs / "learner.log")
        spec = replace(spec, train=train_config(run.config, len(course.steps)), samples=False)
        view.begin(f"supervised training on {run.config.sft.run}", 0)
        say_hosts(run.config, view.note)
        view.stage("supervised steps", len(course.steps))
        learner = await stack.enter_async_context(Learner.start(spec))
        keep_start_model(store, learner)
        last = store.last_step()
        if last is not None:
            await learner.load(run.path / last.checkpoint)
        await _Steps(run, store, metrics, learner, view).run(course, clock)
        model = await _whole(run, learner, run.path / store.steps()[-1].checkpoint)
        summary = {**_summary(run, store, course, clock), "model": str(model)}
        run.write_summary(summary)
        write_text(run.path / REPORT, _report(summary))
        return summary


async def _whole(run: RunDir, learner: Learner, checkpoint: Path) -> Path:
    """Return the model for other verbs: the checkpoint, or the merged model where it holds adapters.

    Raises TrainError.
    """
    if not run.config.policy.lora_rank:
        return checkpoint
    await learner.export(ExportRequest(folder=run.path / MODEL, version=learner.version))
    return run.path / MODEL


def _summary(run: RunDir, store: Store, course: _Course, clock: WallClock) -> Mapping[str, Any]:
    last = store.steps()[-1]
    return {
        "source": run.config.sft.run,
        "chosen": len(course.lessons),
        "choice": course.words,
        "tasks": len({x.task_id for x in course.lessons}),
        "tokens": sum(x.tokens for x in course.lessons),
        "steps": len(course.steps),
        "epochs": run.config.train.epochs,
        "loss": last.metrics["loss"],
        "seed": run.config.run.seed,
        "weights": last.metrics["weights"],
        "checkpoint": str(run.path / last.checkpoint),
        "wall_s": round(clock.seconds(), 1),
        "run_dir": str(run.path),
    }


def _report(summary: Mapping[str, Any]) -> str:
    """Return the final report."""
    return (
        f"{summary['choice']}\n"
        f"{summary['steps']} steps over {summary['chosen']} rollouts of {summary['tasks']} tasks,"
        f" {summary['tokens']:,} tokens, {summary['epochs']} passes; last loss {summary['loss']:.4f}\n"
        f"run    {summary['run_dir']}\n"
        f"next   insitu train CONFIG model.path={summary['model']}\n"
    )
