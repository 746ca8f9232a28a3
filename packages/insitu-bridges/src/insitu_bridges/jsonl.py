"""Exported rollouts as JSON lines: one object per rollout, its segments under `segments`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from insitu.errors import RecordError, boundary
from insitu.types import BoolArray, FloatArray, IntArray
from insitu.types.codec import read
from insitu_bridges.records import ROLLOUTS, ROWS, Record

FILE = "data/rollouts.jsonl"
_ARRAYS = {"ints": IntArray, "bools": BoolArray, "floats": FloatArray}
"""Kind of a column -> type of the value that is read."""


class JsonlWriter:
    """Writes records to an open binary file."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def add(self, record: Record, rows: Sequence[Record]) -> None:
        """Write one rollout. float32 is printed so that it reads back to the same bits."""
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        self._out.write(orjson.dumps({**record, "segments": rows}, option=options))


def read_jsonl(folder: Path) -> Iterator[tuple[Record, list[Record]]]:
    """Yield the records of an export. Raises RecordError with the line that cannot be read."""
    path = folder / FILE
    with boundary(RecordError, f"read {path}"), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = orjson.loads(line)
                rows = [_arrays(row, ROWS) for row in record.pop("segments")]
                yield _arrays(record, ROLLOUTS), rows
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise RecordError(f"{path} line {number} is not an exported rollout: {error}") from error


def _arrays(record: Record, columns: Mapping[str, str]) -> Record:
    """Return a record with its lists as arrays."""
    found: dict[str, Any] = dict(record)
    for name, kind in columns.items():
        if kind in _ARRAYS:
            try:
                found[name] = read(_ARRAYS[kind], record[name])
            except ValueError as error:
                raise ValueError(f"{name} is {error}") from error
    return found
