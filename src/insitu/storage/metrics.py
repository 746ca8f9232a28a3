"""Metrics file `metrics.jsonl`: one JSON object per line, flushed immediately.

A line has `schema_version`, `time_s` (seconds since the epoch) and usually `event`. A torn last line (kill)
is cut off when the file is opened for writing and skipped by readers. A resumed run adds the lines of
committed steps that are missing (`run_dir.restore_steps`). Repeated evaluations and `insitu sft` steps occur
twice: the later line counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import orjson

from insitu.errors import RecordError, boundary

SCHEMA_VERSION = 1
GROUPS = frozenset("all effective loss mismatch tokens time health async sft heldout other".split())
"""Groups by which trackers get metrics; a task set may not have the name of one."""
Metrics = Mapping[str, float | int | str | bool | None]


def disk_error(path: Path, error: Exception) -> RecordError:
    """Return the RecordError of a failed write, with a separate message for a full disk."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    full = full or "disk is full" in str(error)
    if full:
        return RecordError(f"disk full while writing {path}: free some space")
    return RecordError(f"cannot write {path}: {error}")


class MetricsFile:
    """Append-only writer; a context manager. Raises RecordError when a line cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            cut_torn_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise disk_error(path, error) from error

    def write(self, metrics: Metrics) -> None:
        """Append one line; a NaN is written as null."""
        record = {"schema_version": SCHEMA_VERSION, "time_s": time.time(), **metrics}
        self.append(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def append(self, lines: bytes) -> None:
        """Append complete lines at once."""
        try:
            if self._file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            raise disk_error(self._path, error) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete line in order; nothing when the file does not exist.

    Raises RecordError.
    """
    if not path.exists():
        return
    with boundary(RecordError, f"cannot read {path}"), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record: dict[str, Any] = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise RecordError(f"cannot read {path}: line {number} is damaged: {error}") from error
            yield record


def tail_metrics(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, without end, the complete lines that were appended since the last time.

    A damaged line is left out. Raises RecordError.
    """
    start = 0
    while True:
        found = []
        with boundary(RecordError, f"cannot read {path}"), contextlib.suppress(FileNotFoundError):
            data = _read_from(path, start)
            lines = data[: data.rfind(b"\n") + 1]
            start += len(lines)
            for line in lines.splitlines():
                with contextlib.suppress(orjson.JSONDecodeError):
                    found.append(orjson.loads(line))
        yield found


def _read_from(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def cut_torn_line(path: Path) -> None:
    """Truncate the file, if it exists, after its last newline.

    Raises OSError.
    """
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            keep = start if newline < 0 else start + newline + 1
            if newline >= 0:
                break
        if keep < end:
            file.truncate(keep)


def new_lines(batches: Any) -> list[dict[str, Any]]:
    """Return the new lines of a file; none where it cannot be read."""
    with contextlib.suppress(RecordError, StopIteration):
        lines: list[dict[str, Any]] = next(batches)
        return lines
    return []
