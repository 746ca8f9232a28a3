"""`insitu tasks`: list a data set and validate its tasks.

    source -> (task, oracle) -> Grader.validate: base fails, solution passes, N times -> gate file

A finding is stored with the task's hash and image, and is not run again, unless it is an infrastructure
failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from insitu.config import Config
from insitu.errors import ConfigError, InsituError, TaskError, boundary
from insitu.grading.diff import changes
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.grading.trust import trust_of
from insitu.progress.base import View
from insitu.runtime.agents import limits_of
from insitu.runtime.sandboxes import check_tasks, make_pool
from insitu.sandbox.base import SandboxBackend
from insitu.storage.files import write_text
from insitu.tasks.allowlist import SCHEMA, TaskFinding, read_allowlist
from insitu.tasks.base import Item
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import open_source
from insitu.types import Oracle, Task
from insitu_tasksets.live import MAX_BYTES, MAX_FILES, opened, solve, validate_live, validate_steps

COUNTS = ("tasks", "passed", "failed", "no_gold", "infra", "refused_rows")
GENERATED_TASKS = 64
"""Default number of tasks of an endless source."""
KEEP_EVERY_S = 5.0
"""Interval of writes of the gate file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Options of a validation that are not in the configuration."""

    repeats: int = 3
    allowlist: Path | None = None
    """File with the findings; None = `tasks.allowlist`, and without that they are not kept."""
    limit: int = 0
    """Tasks to look at, in the order of the file; 0 = all (generated: GENERATED_TASKS)."""
    ids: Sequence[str] = ()
    """Only these tasks; empty = all."""


def items_of(config: Config, limit: int = 0) -> tuple[Iterator[Item], RowSource | None]:
    """Return the tasks of a set with their oracles, and the data set (None for generated tasks).

    Raises TaskError.
    """
    source = open_source(config, limits_of(config), runner_for)
    if not isinstance(source, RowSource):
        tasks = source.tasks("train", 0, limit or GENERATED_TASKS)
        return (Item(task=t, oracle=source.oracle(t)) for t in tasks), None
    return itertools.islice(source.every(), limit or None), source


def sets_of(config: Config) -> list[Config]:
    """Return the configuration of each task set."""
    return [arm.config for arm in config.set_arms]


def _count(options: ValidateOptions, source: RowSource | None) -> int:
    """Return how many tasks will be looked at."""
    if options.ids:
        return len(options.ids)
    if source is None:
        return options.limit or GENERATED_TASKS
    size = (source.size("train") or 0) + (source.size("eval") or 0)
    return min(options.limit or size, size)


def chosen_of(items: Iterable[Item], ids: Sequence[str]) -> Iterator[Item]:
    """Yield the tasks with these ids, all without ids; raise TaskError at the end for one that is missing."""
    missing = set(ids)
    for item in items:
        if not ids or item.task.id in ids:
            missing.discard(item.task.id)
            yield item
    if missing:
        raise TaskError(f"there is no task {min(missing)}")


async def validate_tasks(config: Config, options: ValidateOptions, view: View) -> Mapping[str, Any]:
    """Validate every task that is not settled, set by set; return counts and failures.

    Raises InsituError.
    """
    found = {own.task_set.name: await _validate_set(own, options, view) for own in sets_of(config)}
    seen = [(name, finding) for name, one in found.items() for finding in one["findings"]]
    if missing := set(options.ids) - {finding["id"] for _, finding in seen}:
        raise TaskError(f"there is no task {min(missing)}")
    sets = {name: {key: one[key] for key in (*COUNTS, "gate")} for name, one in found.items()}
    return {
        **{key: sum(one[key] for one in found.values()) for key in COUNTS},
        "repeats": options.repeats,
        "gate": ", ".join(dict.fromkeys(one["gate"] for one in found.values())),
        "sets": sets if config.set_names else {},
        "not_passed": [{"task_set": name, **one} for name, one in seen if one["status"] != "passed"],
    }


async def _validate_set(config: Config, options: ValidateOptions, view: View) -> Mapping[str, Any]:
    named = config.task_set.allowlist
    path = options.allowlist or (Path(named) if named else None)
    if path is None:
        view.note("findings are not kept; a file of --out or tasks.allowlist keeps them for the next call")
    # What an earlier validation left out is looked at again.
    config = config.model_copy(update={"tasks": (config.task_set.model_copy(update={"allowlist": ""}),)})
    items, source = items_of(config, 0 if options.ids else options.limit)
    gate = _GateFile(path, options.repeats, view)
    view.stage("validating tasks", _count(options, source))
    settings = GradeConfig(timeout_s=config.grade.timeout_s, parallel=config.grade.workers)
    waiting: asyncio.Queue[Item] = asyncio.Queue(maxsize=2 * config.grade.workers)

    async def work(grader: Grader, backend: SandboxBackend) -> None:
        while True:
            item = await waiting.get()
            gate.put(item.task, await check_item(grader, backend, item, options.repeats))
            waiting.task_done()

    try:
        async with make_pool(config, view.note) as pool, asyncio.TaskGroup() as group:
            grader = Grader(pool, settings)
            workers = [group.create_task(work(grader, pool)) for _ in range(config.grade.workers)]
            for item in items:
                if options.ids and item.task.id not in options.ids:
                    continue
                if gate.settled(item.task):
                    view.advance(len(gate.seen))
                    continue
                if (found := unplaced(config, item.task)) is not None:
                    gate.put(item.task, found)
                else:
                    await waiting.put(item)
            await waiting.join()
            for worker in workers:
                worker.cancel()
    finally:
        with contextlib.suppress(TaskError):
            gate.keep()
    return _summary(gate.seen, source, path)


class _GateFile:
    """The gate file during a validation."""

    def __init__(self, path: Path | None, repeats: int, view: View) -> None:
        """Take the file; None = nothing is kept."""
        self._path, self._repeats, self._view = path, repeats, view
        self._earlier = {} if path is None else read_allowlist(path, missing_ok=True).findings
        self._findings = dict(self._earlier)
        self._kept = time.monotonic()
        self.seen: dict[str, TaskFinding] = {}

    def settled(self, task: Task) -> bool:
        found = self._earlier.get(task.id)
        if found is None or not settles(found, task.content_hash, self._repeats):
            return False
        self.seen[task.id] = found
        return True

    def put(self, task: Task, found: TaskFinding) -> None:
        self._findings[task.id] = self.seen[task.id] = found
        reason = f": {found.reason}" if found.reason else ""
        self._view.note(f"{found.status:8} {task.id} ({found.seconds:.1f} s){reason}")
        self._view.advance(len(self.seen))
        if time.monotonic() - self._kept > KEEP_EVERY_S:
            self.keep()
            self._kept = time.monotonic()

    def keep(self) -> None:
        if self._path is not None:
            write_allowlist(self._path, self._findings)


def settles(found: TaskFinding, task_hash: str, repeats: int) -> bool:
    """Return whether a finding holds for a task with this hash and at least `repeats` repeats."""
    if found.task_hash != task_hash or found.status == "infra":
        return False
    return found.repeats >= repeats or found.status != "passed"


def write_allowlist(path: Path, findings: Mapping[str, TaskFinding]) -> None:
    """Write an allowlist (`tasks.allowlist`). Raises TaskError or RecordError."""
    value = {"schema": SCHEMA, "tasks": {name: asdict(found) for name, found in sorted(findings.items())}}
    with boundary(TaskError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(value, indent=1) + "\n")


def unplaced(config: Config, task: Task) -> TaskFinding | None:
    """Return the finding on a task that the sandboxes of [sandbox] cannot run, else None."""
    try:
        check_tasks(config, [task])
    except ConfigError as error:
        reason = str(error).removeprefix(f"task {task.id} ")[:300]
        return TaskFinding(status="infra", task_hash=task.content_hash, image=task.setup.image, reason=reason)
    return None


async def check_item(grader: Grader, backend: SandboxBackend, item: Item, repeats: int) -> TaskFinding:
    """Return the finding on one task; failures of task and sandbox are findings."""
    task, oracle = item.task, item.oracle
    if not (oracle.gold or oracle.gold_patch or oracle.solve):
        reason = "the row has no solution to try"
        return TaskFinding(
            status="no_gold", task_hash=task.content_hash, image=task.setup.image, reason=reason
        )
    began = time.monotonic()
    image = task.setup.image
    try:
        if task.steps:
            await validate_steps(grader, backend, task, oracle, repeats=repeats)
        elif task.grading.where == "live":
            await validate_live(grader, backend, task, oracle, repeats=repeats)
        else:
            solved = await with_gold(backend, task, oracle)
            await grader.validate(task, solved, repeats=repeats)
        image = (await grader.bases.of(task)).image
    except InsituError as error:
        status: Any = "infra" if error.infra else "failed"
        reason = " ".join(str(error).split()).removeprefix(f"task {task.id}: ")[:300]
    else:
        status, reason = "passed", ""
    return TaskFinding(
        status=status,
        task_hash=task.content_hash,
        image=image,
        repeats=repeats,
        reason=reason,
        seconds=round(time.monotonic() - began, 3),
    )


def _summary(
    seen: Mapping[str, TaskFinding], source: RowSource | None, path: Path | None
) -> Mapping[str, Any]:
    counts = Counter(found.status for found in seen.values())
    return {
        "tasks": len(seen),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "no_gold": counts["no_gold"],
        "infra": counts["infra"],
        "refused_rows": 0 if source is None else len(source.refused),
        "gate": str(path or ""),
        "findings": [
            {"id": name, "status": found.status, "reason": found.reason} for name, found in seen.items()
        ],
    }


# --------------------------------------------------------------------------- for people


def list_tasks(config: Config, limit: int = 0) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """Return one row per task and the totals, over all task sets; of an oracle only counts.

    limit: of each set.
    """
    found = [(own.task_set.name, *items_of(own, limit)) for own in sets_of(config)]
    rows: list[Mapping[str, Any]] = [
        {
            "task_set": name,
            "id": item.task.id,
            "category": item.task.category,
            "runner": item.task.grading.runner,
            "trust": trust_of(item.task, item.oracle)[0],
            "tests": len(required(item.oracle)),
            "files": len(item.task.files),
            "image": item.task.setup.image,
            "gold": bool(item.oracle.gold or item.oracle.gold_patch or item.oracle.solve),
            "task_hash": item.task.content_hash,
        }
        for name, items, _ in found
        for item in items
    ]
    sources = [source for _, _, source in found if source is not None]
    refused = [str(refusal) for source in sources for refusal in source.refused]
    total: dict[str, Any] = {"tasks": len(rows), "refused": refused}
    if len(sources) == len(found):  # generated tasks have no end
        total |= {
            "train": sum(source.size("train") or 0 for source in sources),
            "eval": sum(source.size("eval") or 0 for source in sources),
            "left_out": sum(source.left_out for source in sources),
        }
    return rows, total


def show_task(config: Config, task_id: str, *, tests: bool = False) -> Mapping[str, Any]:
    """Return what an agent gets for a task, with `tests` also the requirements. Raises TaskError.

    The task is that of the first set that has it.
    """
    found = ((own.task_set.name, item) for own in sets_of(config) for item in items_of(own)[0])
    name, item = next((place for place in found if place[1].task.id == task_id), ("", None))
    if item is None:
        raise TaskError(f"there is no task {task_id}")
    task: Task = item.task
    hidden = {"required": required(item.oracle)} if tests else {}
    return hidden | {
        "task_set": name,
        "id": task.id,
        "category": task.category,
        "task_hash": task.content_hash,
        "image": task.setup.image,
        "workdir": task.setup.workdir,
        "setup": list(task.setup.commands),
        "root_setup": list(task.setup.root_commands),
        "roots": list(task.setup.roots),
        "runner": task.grading.runner,
        "where": task.grading.where,
        "reward": task.grading.reward,
        "protected": list(task.grading.protected),
        "trust": trust_of(item.task, item.oracle)[0],
        "tests": len(required(item.oracle)),
        "limits": task.limits.model_dump(),
        "files": {path: len(entry.content) for path, entry in sorted(task.files.items())},
        "steps": [step.name for step in task.steps],
        "prompt": task.prompt,
    }


def required(oracle: Oracle) -> list[str]:
    """Return the requirements of a solution, one line each: test ids, cases or commands."""
    tests = oracle.tests
    found = [f"fail_to_pass {name}" for name in tests.fail_to_pass]
    found += [f"pass_to_pass {name}" for name in tests.pass_to_pass]
    found += [f"expected {name} {status}" for name, status in tests.expected]
    found += [f"check {check.name}: {check.command}" for check in tests.checks]
    for exchange in oracle.exchanges:
        found.append(f"exchange {exchange.stdin!r:.200} -> {exchange.expected!r:.200}")
    for case in oracle.cases:
        found.append(f"case {case.function}({', '.join(map(repr, case.args))}) == {case.expected!r}")
    return found


async def with_gold(backend: SandboxBackend, task: Task, oracle: Oracle) -> Oracle:
    """Return the oracle with the tree of its solve.sh, where it has no other gold.

    Raises TaskError when the program fails, SandboxError.
    """
    if oracle.gold or oracle.gold_patch or not oracle.solve:
        return oracle
    async with opened(backend, task) as sandbox:
        before = await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)
        await solve(sandbox, task, oracle)
        await sandbox.kill_all()
        after = await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)
    changed, deleted = changes(before, after)
    if deleted and not changed:
        raise TaskError(f"task {task.id}: the solution only deletes files, which a gold tree cannot express")
    return replace(oracle, gold=changed)
