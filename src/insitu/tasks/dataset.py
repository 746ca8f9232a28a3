"""A TaskSource over a data set on disk: every row is checked at load, before any sandbox boots.

What is kept per row is its id, its content hash and where it is; the row itself is read again when it is
used, so that fifty thousand rows of a large set fit in memory. A row that cannot be graded is refused with
its id and the reason, or left out and counted, as `tasks.on_invalid_row` says.
"""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import ValidationError

from insitu.errors import TaskError, describe_invalid
from insitu.tasks.base import Item, Split, split_of
from insitu.tasks.commands import programs_of
from insitu.tasks.row_files import (
    MAX_REASON_CHARS,
    RawRow,
    RowLocation,
    RowSelection,
    read_places,
    row_id,
)
from insitu.types import Limits, Oracle, Task

log = logging.getLogger(__name__)

SHOWN_REFUSALS = 3
SHOWN_REASONS = 8
_VARYING = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])\d[\d.,]*|(?<=services\.)[\w-]+|(?<=\.env\.)\w+""")
"""What of a reason is the row's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What of the configuration a loader needs."""

    limits: Limits = field(default_factory=Limits)
    """For what a row does not limit itself."""
    assets: Path | None = None
    """Folder with files that a set keeps beside its rows."""
    checker: str = ""
    """Dotted path of the user's function for tasks of runner `stdio`; empty = none."""
    images: dict[str, str] = field(default_factory=dict)
    """Image name, or task id, -> the reference to use: a pin by digest, a mirror, an image built by hand."""

    memory_mb: int = 0
    """Memory of a sandbox; 0 = unknown."""
    disk_mb: int = 0
    """Disk of a sandbox with an image; 0 = no limit."""
    untested: bool = False
    """Accept tasks without hidden tests: a reward function scores them."""

    def allow_untested(self) -> None:
        """Raise TaskError for a task without hidden tests, unless a reward function scores it."""
        if not self.untested:
            raise TaskError(
                "needs exactly one of cases, io, fail_to_pass (with tests) and checks, or a reward.function"
            )

    def image(self, name: str, task_id: str = "") -> str:
        return self.images.get(task_id) or self.images.get(name, name)


RowCheck = Callable[[Task, Oracle], object]


@runtime_checkable
class Format(Protocol):
    """One data set's schema."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        """Where the rows are. Raises TaskError when `path` is not of this format."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        """Task and oracle of a row. Raises ValidationError or TaskError for one that cannot be graded."""


class RowFormat:
    """Base of the formats whose rows are in JSON lines, JSON or Parquet files."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        return read_places(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """A row that cannot be used."""

    where: str
    id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {f'row {self.id}: ' if self.id else ''}{self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    id: str
    content_hash: str
    place: RowLocation
    needs: tuple[bool | str, ...]
    """Whether it is made of an image, whether it is graded live, its runner, and programs of its checks."""


class RowSource:
    """Tasks of one data set. `seed` shuffles the train split; the eval split keeps the file's order."""

    def __init__(
        self,
        name: str,
        form: Format,
        path: Path,
        options: LoadOptions | None = None,
        *,
        eval_share: float = 0.25,
        seed: int = 0,
        on_invalid_row: Literal["refuse", "skip"] = "refuse",
        check: RowCheck | None = None,
        transform: Callable[..., Any] | None = None,
        rows: RowSelection = RowSelection(),  # noqa: B008 - it is frozen
    ) -> None:
        """`check` raises TaskError for a task that its runner cannot judge."""
        self._rows = rows
        self._check_task = check
        self._name, self._form, self._options = name, form, options or LoadOptions()
        self._transform, self._seed = transform, seed
        self.refused: list[_Refusal] = []
        self.left_out = 0
        """Rows for which transform gave None."""
        entries = list(self._check_rows(path, stop=on_invalid_row == "refuse"))
        if not entries:
            first = f"; {self.refused[0]}" if self.refused else ""
            raise TaskError(f"{path} holds no task{first}")
        self._by_id = {entry.id: entry for entry in entries}
        self._split: dict[Split, list[_Entry]] = {"train": [], "eval": []}
        for entry in entries:
            self._split[split_of(entry.content_hash, eval_share)].append(entry)
        self._item = lru_cache(maxsize=64)(self._load)

    @property
    def name(self) -> str:
        return self._name

    def size(self, split: Split) -> int | None:
        return len(self._split[split])

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        entries = self._split[split]
        short = not entries or (split == "eval" and start + count > len(entries))
        if short and count:
            raise TaskError(f"the {split} split of {self._name} has {len(entries)} tasks")
        if split == "eval":
            return [self._item(entry).task for entry in entries[start : start + count]]
        return [self._item(self._in_epoch(index)).task for index in range(start, start + count)]

    def train_ids(self) -> Sequence[str]:
        """Return the ids of the train split in the order of its first epoch."""
        return [self._in_epoch(index).id for index in range(len(self._split["train"]))]

    def every(self) -> Iterator[Item]:
        """All tasks in the order of the file, with their oracles: for the grading side only."""
        return (self._load(entry) for entry in self._by_id.values())

    def used(self) -> Iterator[Item]:
        """Yield the tasks of both splits with their oracles; only for the grading side."""
        return (self._load(entry) for entries in self._split.values() for entry in entries)

    def examples(self) -> Sequence[Task]:
        """Return one task of each kind: with an image or without, by runner and by programs of its checks."""
        used = [entry for entries in self._split.values() for entry in entries]
        return [self._item(entry).task for entry in {entry.needs: entry for entry in used}.values()]

    @property
    def live(self) -> int:
        """How many of its tasks are graded in their agent's sandbox."""
        return sum(entry.needs[1] is True for entries in self._split.values() for entry in entries)

    def oracle(self, task: Task) -> Oracle:
        return self._found(task).oracle

    def row(self, task: Task) -> RawRow:
        self._found(task)
        return self._row(self._by_id[task.id].place) or {}

    def keep(self, hashes: frozenset[str]) -> None:
        """Leave out every task whose content hash is not among `hashes`. Raises TaskError if none is left."""
        for split, entries in self._split.items():
            self._split[split] = [entry for entry in entries if entry.content_hash in hashes]
        if not any(self._split.values()):
            raise TaskError(f"none of the {len(self._by_id)} tasks passed `insitu tasks validate`")

    def _found(self, task: Task) -> Item:
        entry = self._by_id.get(task.id)
        item = None if entry is None else self._item(entry)
        if item is None or item.task.content_hash != task.content_hash:
            raise TaskError(f"task {task.id} does not come from this source")
        return item

    def _in_epoch(self, index: int) -> _Entry:
        entries = self._split["train"]
        epoch, at = divmod(index, len(entries))
        return entries[_order(self._seed, epoch, len(entries))[at]]

    def _row(self, place: RowLocation) -> RawRow | None:
        row = {} if not place.number else place.row()
        if self._transform is None:
            return row
        try:
            changed = self._transform(dict(row))
        except Exception as error:
            raise TaskError(f"transform raised {error!a}") from error
        if changed is not None and not isinstance(changed, dict):
            raise TaskError(f"transform gave a {type(changed).__name__}, not a dict or None")
        return changed

    def _load(self, entry: _Entry) -> Item:
        row = self._row(entry.place)
        item = self._form.build(row or {}, entry.place, self._options)
        if item.task.content_hash != entry.content_hash:
            raise TaskError(f"{entry.place}: task {entry.id} changed on disk since it was loaded")
        return item

    def _check_rows(self, path: Path, *, stop: bool) -> Iterator[_Entry]:
        ids: dict[str, RowLocation] = {}
        hashes: dict[str, str] = {}
        for place in self._rows.of(self._form.places(path)):
            try:
                entry = self._check(place, ids, hashes)
            except (TaskError, _Bad) as error:
                self.refused.append(error.refusal if isinstance(error, _Bad) else _refusal(place, error))
                continue
            if entry is None:
                self.left_out += 1
                continue
            ids[entry.id], hashes[entry.content_hash] = place, entry.id
            yield entry
        if stop and self.refused:
            shown = [str(refusal) for refusal in self.refused[:SHOWN_REFUSALS]]
            more = [self.refusals(len(ids))] if len(self.refused) > SHOWN_REFUSALS else []
            raise TaskError("; ".join([*shown, *more, "tasks.on_invalid_row=skip leaves such rows out"]))
        if self.refused:
            log.warning("%s", self.refusals(len(ids)))

    def refusals(self, usable: int) -> str:
        """Return a line that counts the refused rows by reason."""
        counts = Counter(_VARYING.sub("...", refusal.reason) for refusal in self.refused).most_common()
        shown = [f"{count} x {reason}" for reason, count in counts[:SHOWN_REASONS]]
        shown += [f"{len(counts) - SHOWN_REASONS} more reasons"] if len(counts) > SHOWN_REASONS else []
        return f"{len(self.refused)} of {len(self.refused) + usable} rows are refused: {', '.join(shown)}"

    def _check(
        self, place: RowLocation, ids: dict[str, RowLocation], hashes: dict[str, str]
    ) -> _Entry | None:
        row = self._row(place)
        if row is None:
            return None
        try:
            item = self._form.build(row, place, self._options)
            if self._check_task is not None:
                self._check_task(item.task, item.oracle)
        except ValidationError as error:
            raise _Bad(_refusal(place, describe_invalid(error), row_id(row))) from None
        except (TaskError, ValueError, TypeError, OverflowError) as error:  # one row does not end the others
            raise _Bad(_refusal(place, error, row_id(row))) from None
        task = item.task
        if task.id in ids:
            raise _Bad(_refusal(place, f"duplicate id, also in {ids[task.id]}", task.id))
        if task.content_hash in hashes:
            raise _Bad(_refusal(place, f"duplicate of {hashes[task.content_hash]}", task.id))
        return _Entry(
            id=task.id,
            content_hash=task.content_hash,
            place=place,
            needs=(
                bool(task.setup.image),
                task.grading.where == "live",
                bool(task.steps),
                task.grading.runner,
                *programs_of(item.oracle),
            ),
        )


class _Bad(Exception):
    def __init__(self, refusal: _Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def _refusal(place: RowLocation, reason: object, name: str = "") -> _Refusal:
    name = name or ("" if place.number else place.path.name)
    return _Refusal(where=str(place), id=name, reason=" ".join(str(reason).split())[:MAX_REASON_CHARS])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> Sequence[int]:
    order = list(range(count))
    # The text is part of the seed: another one gives another order.
    random.Random(f"whet-tasks-{seed}-{epoch}").shuffle(order)
    return order
