"""`insitu grade RUN`: judges stored rollouts again, from their stored files and the task source.

Nothing of the run is changed unless asked for, and never what a committed step was trained on: a replay must
find the rewards that the weights were made of. A difference is named, whichever side it comes from: the task
changed, the files are not those that were judged, or the grader comes to another word.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from insitu.config import Config
from insitu.errors import GradeError, TaskError
from insitu.grading.grader import GradeConfig, Grader, runner_for
from insitu.grading.judge import TaskJudge
from insitu.runtime.agents import limits_of
from insitu.runtime.sandboxes import check_tasks, make_pool
from insitu.shutdown import run_interruptible
from insitu.storage.run_dir import RunDir, read_config, read_store
from insitu.storage.store import Store
from insitu.tasks.base import Split, TaskSource
from insitu.tasks.factory import open_source
from insitu.types import Outcome, Rollout, Task, Verdict

CHUNK = 64
LOOKED_AT = 100_000
"""Tasks of an endless source that are looked through for those of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One rollout whose second verdict is not its first, or that cannot have one."""

    rollout: str
    stored: str
    now: str
    """The second outcome; empty when there is none."""
    reason: str


@dataclass(slots=True)
class Regraded:
    """What the second judgement came to."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    skipped: int = 0
    """Rollouts without a verdict, or whose tree or task is no longer there."""
    updated: int = 0

    def as_json(self) -> dict[str, object]:
        """Counts per outcome, and nothing else."""
        return {outcome.value: self.counts[outcome.value] for outcome in Outcome}

    def compared(self) -> dict[str, object]:
        """What is no count of an outcome."""
        differences = [
            {"rollout": d.rollout, "stored": d.stored, "now": d.now, "reason": d.reason}
            for d in self.differences
        ]
        return {"skipped": self.skipped, "updated": self.updated, "differences": differences}


def run(path: Path, *, write: bool, json: bool) -> bool:
    """The verb. True when every rollout has the verdict it had. Raises RecordError, TaskError, SetupError."""
    found = run_interruptible(regrade_run(path, write=write))
    print(report(found), end="", file=sys.stderr if json else sys.stdout)
    if json:
        print(orjson.dumps({"compared": found.compared()}).decode())
        print(orjson.dumps(found.as_json()).decode())
    return not found.differences


def report(found: Regraded) -> str:
    lines = [f"{outcome.value:>14}  {found.counts[outcome.value]}" for outcome in Outcome]
    lines += [f"{'skipped':>14}  {found.skipped}"] if found.skipped else []
    lines += [f"{'updated':>14}  {found.updated}"] if found.updated else []
    lines += [
        f"{d.rollout}: was {d.stored}, now {d.now or 'not judged'}: {d.reason}" for d in found.differences
    ]
    return "\n".join(lines) + "\n"


async def regrade_run(path: Path, *, write: bool = False) -> Regraded:
    if not write:
        with read_store(path) as store:
            return await _regrade(read_config(path), store, write=False)
    with RunDir.open(path) as held, held.store() as store:
        return await _regrade(held.config, store, write=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _regrade(config: Config, store: Store, *, write: bool) -> Regraded:
    source = open_source(config, limits_of(config), runner_for)
    found = Regraded()
    places = list(store.phases())
    wanted = {one.task_id for phase, step in places for one in store.rollouts(phase, step)}
    tasks = find_tasks(source, wanted)
    check_tasks(config, tasks.values())
    async with make_pool(config, _say) as pool:
        settings = GradeConfig(timeout_s=config.grade.timeout_s, parallel=config.grade.workers, remember=0)
        judge = TaskJudge(Grader(pool, settings), source, config.grade.min_trust)
        try:
            for phase, step in places:
                may = write and (phase != "train" or store.still_open(phase, step))
                for some in _chunks(store.rollouts(phase, step)):
                    await _judge_all(some, tasks, judge, found, store if may else None)
        finally:
            await judge.close()
    return found


def _chunks(rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
    for start in range(0, len(rollouts), CHUNK):
        yield rollouts[start : start + CHUNK]


def find_tasks(source: TaskSource, wanted: set[str]) -> dict[str, Task]:
    """Tasks by id, of both splits. What the source no longer has is left out."""
    found: dict[str, Task] = {}
    splits: tuple[Split, ...] = ("train", "eval")
    sizes = {split: source.size(split) for split in splits}
    most = {split: LOOKED_AT if size is None else size for split, size in sizes.items()}
    # in turn: what the second split has must not wait for the end of an endless first one
    for start in range(0, max(most.values()), CHUNK):
        for split in splits:
            if wanted <= found.keys():
                return found
            for task in source.tasks(split, start, max(0, min(CHUNK, most[split] - start))):
                if task.id in wanted:
                    found[task.id] = task
    return found


async def _judge_all(
    rollouts: Sequence[Rollout],
    tasks: Mapping[str, Task],
    judge: TaskJudge,
    found: Regraded,
    store: Store | None,
) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = [
            (rollout, rollout.verdict, group.create_task(again(rollout, rollout.verdict, tasks, judge)))
            for rollout in rollouts
            if rollout.verdict is not None
        ]
    found.skipped += len(rollouts) - len(waiting)
    for rollout, stored, done in waiting:
        now = done.result()
        if isinstance(now, str):
            found.skipped += 1
            if now:
                found.differences.append(
                    Difference(rollout=rollout.id, stored=stored.outcome, now="", reason=now)
                )
            continue
        found.counts[now.outcome.value] += 1
        why = differs(stored, now)
        if not why:
            continue
        found.differences.append(
            Difference(rollout=rollout.id, stored=stored.outcome, now=now.outcome, reason=why)
        )
        if store is not None and now.outcome is not Outcome.INFRA:
            store.put_verdict(rollout.id, now)
            found.updated += 1


async def again(
    rollout: Rollout, stored: Verdict, tasks: Mapping[str, Task], judge: TaskJudge
) -> Verdict | str:
    """The second verdict; or why there is none, empty where that is as it should be."""
    task = tasks.get(rollout.task_id)
    if task is None:
        return f"the task source no longer has {rollout.task_id}"
    if task.content_hash != stored.task_hash:
        return f"task {task.id} is not the one that was judged"
    if stored.outcome is Outcome.REFUSED and not rollout.changed and not rollout.deleted:
        return ""  # what is refused is not kept: there is nothing to judge
    try:
        base = await judge.base(task)
        tree = {path: entry for path, entry in base.items() if path not in rollout.deleted}
        verdict = await judge(task, {**tree, **rollout.changed})
    except (TaskError, GradeError) as error:
        return str(error)
    # The stored files are those that were left after the filter: what it dropped is known from then.
    return replace(verdict, dropped_paths=stored.dropped_paths)


def differs(stored: Verdict, now: Verdict) -> str:
    """In what a second verdict is another, or empty."""
    if now.diff_hash != stored.diff_hash:
        return "the stored files are not those that were judged"
    if now.outcome is not stored.outcome:
        return now.reason
    if now.reward != stored.reward:
        return f"the reward was {stored.reward}, now {now.reward}"
    return ""
