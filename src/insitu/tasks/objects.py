"""Tasks from Python objects: a list or an iterator, also an endless one.

An entry is a Task, a pair (Task, Oracle), or a row of the format `jsonl` as a dictionary. A Task without an
oracle has no hidden tests: only a reward function can score it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from insitu.errors import TaskError, user_code
from insitu.tasks.base import UNTESTED, Item, Split, split_of
from insitu.tasks.dataset import LoadOptions, RowCheck
from insitu.tasks.own_formats import PlainJsonl
from insitu.tasks.row_files import RawRow, RowLocation
from insitu.tasks.shared import make_item
from insitu.types import Limits, Oracle, Task

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObjectLocation(RowLocation):
    """Position of an entry in its list or iterator."""

    entry: object = field(compare=False)

    def row(self) -> RawRow:
        return self.entry if isinstance(self.entry, Mapping) else {}


def location(entry: object, number: int) -> _ObjectLocation:
    """Return the location of entry `number`, from 1."""
    return _ObjectLocation(path=Path("tasks.source"), number=number, entry=entry)


class ObjectFormat:
    """Format of a list of entries."""

    def __init__(self, entries: Sequence[object]) -> None:
        self._entries = entries

    def places(self, path: Path) -> Iterator[RowLocation]:
        return (location(entry, number) for number, entry in enumerate(self._entries, 1))

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        entry = place.entry if isinstance(place, _ObjectLocation) else row
        if isinstance(entry, Mapping):
            return PlainJsonl().build(row, place, options)
        task, oracle = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if not isinstance(task, Task) or not isinstance(oracle, Oracle | None):
            raise TaskError(f"{type(entry).__name__} is not a Task, (Task, Oracle) or dictionary")
        if oracle is None and not options.untested:
            raise TaskError(
                f"task {task.id} has no hidden tests: pass (task, oracle), or set reward.function"
            )
        return make_item(
            id=task.id,
            prompt=task.prompt,
            files=task.files,
            setup=task.setup,
            grading=task.grading if oracle else replace(task.grading, runner=UNTESTED),
            limits=options.limits if task.limits == Limits() else task.limits,
            category=task.category,
            oracle=oracle or Oracle(task_id=task.id),
        )


class StreamSource:
    """Tasks of an iterator, read as they are needed and kept; past its end the train split repeats."""

    name = "iterator"

    def __init__(
        self, entries: Iterator[object], options: LoadOptions, check: RowCheck, *, eval_share: float
    ) -> None:
        self._entries, self._options, self._check = entries, options, check
        self._eval_share = eval_share
        self._read: dict[str, tuple[Item, RawRow]] = {}
        self._split: dict[Split, list[Task]] = {"train": [], "eval": []}
        self._ended = False

    def size(self, split: Split) -> int | None:
        never = split == "eval" and not self._eval_share
        return len(self._split[split]) if self._ended or never else None

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        found = self._split[split]
        while len(found) < start + count and self.size(split) is None:
            self._read_next()
        if split == "eval" or not found:
            if len(found) < start + count:
                raise TaskError(f"the {split} split of the iterator has {len(found)} tasks")
            return found[start : start + count]
        return [found[index % len(found)] for index in range(start, start + count)]

    def oracle(self, task: Task) -> Oracle:
        return self._found(task)[0].oracle

    def row(self, task: Task) -> RawRow:
        return self._found(task)[1]

    def _found(self, task: Task) -> tuple[Item, RawRow]:
        if task.id not in self._read:
            raise TaskError(f"task {task.id} does not come from this source")
        return self._read[task.id]

    def _read_next(self) -> None:
        with user_code(TaskError, "tasks.source"):
            entry = next(self._entries, _END)
        if entry is _END:
            self._ended = True
            return
        place = location(entry, len(self._read) + 1)
        item = ObjectFormat(()).build(place.row(), place, self._options)
        self._check(item.task, item.oracle)
        if item.task.id in self._read:
            raise TaskError(f"{place}: the id {item.task.id} was used before")
        self._read[item.task.id] = item, place.row()
        self._split[split_of(item.task.content_hash, self._eval_share)].append(item.task)
