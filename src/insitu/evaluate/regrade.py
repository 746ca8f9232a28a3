"""`insitu grade RUN`: grade stored rollouts again from their stored files and the task source.

The run is changed only with `--write`, and never for rollouts of committed steps, since a replay needs the
rewards that the weights were trained on. Reports every difference: a changed task, changed files or a
different verdict.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from insitu.config import Config
from insitu.errors import GradeError, TaskError
from insitu.grading.judge import TaskJudge
from insitu.progress.base import View
from insitu.runtime.agents import find_pools
from insitu.runtime.preflight import open_mix
from insitu.runtime.run import make_judges
from insitu.runtime.sandboxes import check_tasks
from insitu.storage.run_dir import RunDir, read_config, read_store
from insitu.storage.store import Store
from insitu.tasks.base import Split
from insitu.tasks.mix import TaskSet
from insitu.types import Outcome, Rollout, Task, Verdict

CHUNK = 64
MAX_SEARCHED = 100_000
"""Number of tasks of an infinite source that are searched for those of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One rollout whose new verdict differs, or that cannot be graded again."""

    rollout: str
    stored: str
    now: str
    """The new outcome; empty when there is none."""
    reason: str


@dataclass(slots=True)
class Regraded:
    """Result of grading a run again."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    skipped: int = 0
    """Rollouts without a verdict, or whose files or task are missing."""
    updated: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the counts per outcome."""
        return {outcome.value: self.counts[outcome.value] for outcome in Outcome}

    def compared(self) -> dict[str, object]:
        """Return the differences between stored and new verdicts, and the skipped and updated counts."""
        differences = [
            {"rollout": d.rollout, "stored": d.stored, "now": d.now, "reason": d.reason}
            for d in self.differences
        ]
        return {"skipped": self.skipped, "updated": self.updated, "differences": differences}


def report(found: Regraded) -> str:
    """Return counts and differences as text."""
    lines = [f"{outcome.value:>14}  {found.counts[outcome.value]}" for outcome in Outcome]
    lines += [f"{'skipped':>14}  {found.skipped}"] if found.skipped else []
    lines += [f"{'updated':>14}  {found.updated}"] if found.updated else []
    lines += [
        f"{d.rollout}: was {d.stored}, now {d.now or 'not graded'}: {d.reason}" for d in found.differences
    ]
    return "\n".join(lines) + "\n"


async def regrade_run(path: Path, view: View, *, write: bool = False) -> Regraded:
    """Grade a run again. Raises RecordError, TaskError, SetupError."""
    if not write:
        with read_store(path) as store:
            return await _regrade(read_config(path), store, view, write=False)
    with RunDir.open(path) as run_dir, run_dir.store() as store:
        return await _regrade(run_dir.config, store, view, write=True)


async def _regrade(config: Config, store: Store, view: View, *, write: bool) -> Regraded:
    source = open_mix(config)
    result = Regraded()
    phases = store.phases()
    task_ids = {rollout.task_id for phase, step in phases for rollout in store.rollouts(phase, step)}
    tasks = {(one.name, task.id): task for one in source.sets for task in find_tasks(one, task_ids).values()}
    for task in tasks.values():
        check_tasks(source.of(task).config, [task])
    done = 0
    pools = find_pools(config.arms, view.note, lambda check, *args: check(*args))
    async with AsyncExitStack() as stack:
        for pool in dict.fromkeys(pools.values()):
            await stack.enter_async_context(pool)
        judges = make_judges(config.arms, pools, source, cached=False)
        try:
            view.stage("grading", sum(phases.values()))
            for phase, step in phases:
                writable = write and (phase != "train" or store.still_open(phase, step))
                for chunk in _chunks(store.rollouts(phase, step)):
                    await _judge_all(chunk, tasks, judges, result, store if writable else None)
                    done += len(chunk)
                    view.advance(done)
        finally:
            for judge in dict.fromkeys(judges.values()):
                await judge.close()
    return result


def _chunks(rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
    for start in range(0, len(rollouts), CHUNK):
        yield rollouts[start : start + CHUNK]


def find_tasks(source: TaskSet, task_ids: set[str]) -> dict[str, Task]:
    """Return the tasks with these ids from both splits; missing ones are omitted."""
    found: dict[str, Task] = {}
    splits: tuple[Split, ...] = ("train", "eval")
    sizes = {split: source.size(split) for split in splits}
    limits = {split: MAX_SEARCHED if size is None else size for split, size in sizes.items()}
    # Alternating, so that an infinite first split does not delay the second.
    for start in range(0, max(limits.values()), CHUNK):
        for split in splits:
            if task_ids <= found.keys():
                return found
            for task in source.tasks(split, start, max(0, min(CHUNK, limits[split] - start))):
                if task.id in task_ids:
                    found[task.id] = task
    return found


async def _judge_all(
    rollouts: Sequence[Rollout],
    tasks: Mapping[tuple[str, str], Task],
    judges: Mapping[str, TaskJudge],
    result: Regraded,
    store: Store | None,
) -> None:
    async with asyncio.TaskGroup() as group:
        pending = [
            (
                rollout,
                rollout.verdict,
                group.create_task(_grade_again(rollout, rollout.verdict, tasks, judges)),
            )
            for rollout in rollouts
            if rollout.verdict is not None
        ]
    result.skipped += len(rollouts) - len(pending)
    for rollout, stored, done in pending:
        now = done.result()
        if isinstance(now, str):
            result.skipped += 1
            if now:
                result.differences.append(
                    Difference(rollout=rollout.id, stored=stored.outcome, now="", reason=now)
                )
            continue
        verdict = now.verdict or stored
        result.counts[verdict.outcome.value] += 1
        reason = describe_difference(rollout, now)
        if not reason:
            continue
        result.differences.append(
            Difference(rollout=rollout.id, stored=stored.outcome, now=verdict.outcome, reason=reason)
        )
        if store is not None and verdict.outcome is not Outcome.INFRA:
            store.put_reward(now)
            result.updated += 1


async def _grade_again(
    rollout: Rollout,
    stored: Verdict,
    tasks: Mapping[tuple[str, str], Task],
    judges: Mapping[str, TaskJudge],
) -> Rollout | str:
    """Return the rollout with its new verdict and reward, or why there is none (empty if none is expected).

    The reward of a function that needs the whole group stays as stored.
    """
    task = tasks.get((rollout.task_set, rollout.task_id))
    if rollout.part not in judges:
        return f"the configuration has no part {rollout.part!r}"
    if task is None:
        return f"the task source no longer has {rollout.task_id}"
    judge = judges[rollout.part]
    if task.content_hash != stored.task_hash:
        return f"task {task.id} has changed since it was graded"
    if stored.outcome is Outcome.REFUSED and not rollout.changed and not rollout.deleted:
        return ""  # The files of refused rollouts are not stored.
    try:
        base = await judge.base(task)
        tree = {path: entry for path, entry in base.items() if path not in rollout.deleted}
        verdict = await judge(task, {**tree, **rollout.changed})
        # The stored files were already filtered, so the dropped paths come from the stored verdict.
        verdict = replace(verdict, dropped_paths=stored.dropped_paths)
        if verdict.outcome is Outcome.INFRA or judge.scores_groups:
            return replace(rollout, verdict=verdict)
        return await judge.score(task, replace(rollout, verdict=verdict, reward=verdict.reward))
    except (TaskError, GradeError) as error:
        return str(error)


def describe_difference(stored: Rollout, now: Rollout) -> str:
    """Return how a new verdict or reward differs from the stored one; empty if it does not."""
    old, new = stored.verdict, now.verdict
    if new is not None and new.outcome is Outcome.INFRA:
        return new.reason
    if old is None or new is None or new.diff_hash != old.diff_hash:
        return "the stored files are not those that were graded"
    if new.outcome is not old.outcome:
        return new.reason
    if now.reward != stored.reward:
        return f"the reward was {stored.reward}, now {now.reward}"
    return ""
