"""Export of tasks as rows of the format `jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.types import Tree


def export_rows(items: Iterable[Item]) -> Iterator[bytes]:
    """Yield one line per task; raise TaskError for a task that such a row cannot express."""
    for item in items:
        task, oracle = item.task, item.oracle
        if task.grading.runner != "json_io" or task.setup.image or task.setup.commands:
            raise TaskError(f"task {task.id}: only plain tasks with hidden cases (json_io) can be exported")
        row: dict[str, Any] = {
            "id": task.id,
            "prompt": task.prompt,
            "files": _texts(task.files),
            "entry": task.grading.entry,
            "cases": [
                {"function": case.function, "args": case.args, "expected": case.expected, "exact": case.exact}
                for case in oracle.cases
            ],
            "gold": _texts(oracle.gold),
            "protected": task.grading.protected,
            "timeout_s": task.grading.timeout_s,
            "category": task.category,
        }
        yield orjson.dumps(row) + b"\n"


def _texts(tree: Tree) -> dict[str, str]:
    return {path: entry.content.decode() for path, entry in tree.items()}
