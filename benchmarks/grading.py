"""`python -m benchmarks grading FILE`: what the grader says of a data set's own solutions, and of its stubs.

Every solution must be resolved and no stub may be: the base with a comment, so that it is run and not
dismissed for having changed nothing. For tasks that are files and have a whole solution, as HumanEval has.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

import orjson

from benchmarks._arguments import Arguments, count, count_or_zero
from insitu.config import Config, load_config
from insitu.errors import ConfigError, InsituError, TaskError, first_error
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Item
from insitu.tasks.factory import open_rows
from insitu.types import FileEntry, Outcome, Tree, Verdict

COMMENT = b"\n# a stub: nothing is solved here\n"


def solution_of(item: Item) -> Tree:
    return {**item.task.files, **item.oracle.gold}


def stub_of(item: Item) -> Tree:
    """Raises TaskError for a task without a file under test."""
    base = item.task.files.get(item.task.grading.entry)
    if base is None:
        raise TaskError(f"task {item.task.id} has no file under test")
    return {**item.task.files, item.task.grading.entry: FileEntry(content=base.content + COMMENT)}


async def measure(items: Sequence[Item], grader: Grader) -> dict[str, dict[str, Verdict]]:
    """`solution` and `stub` -> verdict by task."""

    async def one(kind: str, item: Item) -> None:
        after = solution_of(item) if kind == "solution" else stub_of(item)
        found[kind][item.task.id] = await grader.grade(item.task, item.oracle, after)

    found: dict[str, dict[str, Verdict]] = {"solution": {}, "stub": {}}
    try:
        async with asyncio.TaskGroup() as running:
            for item in items:
                for kind in found:
                    running.create_task(one(kind, item))
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await grader.close()
    return found


def run(config: Config, count: int = 0) -> dict[str, object]:
    """Grade and count. Raises InsituError when the set cannot be graded at all."""
    items = list(open_rows(config, limits_of(config), runner_for).every())
    items = items[: count or len(items)]
    bare = [item.task.id for item in items if item.task.setup.image or not item.oracle.gold]
    if bare:
        raise ConfigError(f"{bare[0]} is no task of files with a whole solution")
    backend = LocalBackend()
    grader = Grader(backend, GradeConfig(timeout_s=config.grade.timeout_s, parallel=config.grade.workers))
    began = time.monotonic()
    found = asyncio.run(measure(items, grader))
    wall_s = time.monotonic() - began
    reported: dict[str, object] = {
        "tasks": len(items),
        "runners": dict(Counter(item.task.grading.runner for item in items)),
        "wall_s": round(wall_s, 1),
        "workers": config.grade.workers,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(v, 2) for v in os.getloadavg()],
    }
    for kind, verdicts in found.items():
        reported[kind] = dict(Counter(verdict.outcome.value for verdict in verdicts.values()))
        reported[f"{kind}_wrong"] = {
            name: f"{verdict.outcome.value}: {verdict.reason}"
            for name, verdict in verdicts.items()
            if (verdict.outcome is Outcome.RESOLVED) != (kind == "solution")
            or verdict.outcome is Outcome.INFRA
        }
    return reported


def main(argv: Sequence[str] | None = None) -> int:
    """One JSON object as the last line of stdout; 1 when a verdict is not what it must be."""
    parser = Arguments(prog="benchmarks grading", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", help="the data set, e.g. HumanEval.jsonl.gz")
    parser.add_argument("--source", default="humaneval", help="its format (default: humaneval)")
    parser.add_argument("--tasks", type=count_or_zero, default=0, help="only the first of them")
    parser.add_argument("--workers", type=count, default=2, help="gradings at the same time (default: 2)")
    args = parser.parse_args(argv)
    settings = [
        f"tasks.source={args.source}",
        f"tasks.path={args.file}",
        "tasks.eval_share=1.0",
        f"grade.workers={args.workers}",
    ]
    try:
        reported = run(load_config(None, settings), args.tasks)
    except InsituError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    print(orjson.dumps(reported).decode())
    return 1 if reported["solution_wrong"] or reported["stub_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
