"""Reads rows from JSONL, gzipped JSONL and JSON files, and what the schemas of all data sets share.

A row is read when it is used: a data set is kept as places in a file, not as its content. Every error names
the file, the line and, where it has one, the id of the row.
"""

from __future__ import annotations

import ast
import difflib
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic.fields import FieldInfo

from insitu.errors import SetupError, TaskError, boundary
from insitu.install_hints import install_extra

RawRow = Mapping[str, Any]
MAX_REASON_CHARS = 300
MAX_DIGITS = 100_000
"""Of an integer in a row or in an answer. The time to read one grows with the square."""
# Python's own cap, 4300, is for the whole process: sets and solutions have longer ones (factorials, powers).
sys.set_int_max_str_digits(MAX_DIGITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLocation:
    """Where one row is."""

    path: Path
    number: int
    """Line, or index in the list, from 1; 0 = the path is a task folder."""
    offset: int = -1
    """Byte offset of the line in a plain JSONL file; -1 = `content` holds it."""
    content: bytes = b""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.number else str(self.path)

    def row(self) -> RawRow:
        """Read the row; raise TaskError."""
        line = self.content
        if self.offset >= 0:
            with boundary(TaskError, f"read {self}"), self.path.open("rb") as file:
                file.seek(self.offset)
                line = file.readline()
        return parse_object(line, str(self))


def parse_object(text: bytes | str, where: str) -> RawRow:
    """One JSON object. NaN and infinities are refused. Raises TaskError."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TaskError(f"{where}: not a JSON object")
    return value


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Rows of a data set by their places in it, as Python writes them: [100:200], [::4], [3, 5, -1]."""

    text: str = ""
    """What is between the brackets; empty = all rows."""

    def of(self, places: Iterator[RowLocation]) -> Iterator[RowLocation]:
        """Yield the selected ones of `places`; raise TaskError for an index that none has."""
        if not self.text:
            yield from places
        elif ":" in self.text:
            yield from list(places)[
                slice(*(int(part) if part.strip() else None for part in self.text.split(":")))
            ]
        else:
            found = list(places)
            for index in map(int, self.text.split(",")):
                if not -len(found) <= index < len(found):
                    raise TaskError(f"tasks.path: there is no row {index}, the data set has {len(found)}")
                yield found[index]


_SELECTION = re.compile(r"(.+)\[(-?\d+(?:\s*,\s*-?\d+)*|(?:-?\d*:){1,2}-?\d*)\]")


def split_selection(text: str) -> tuple[str, RowSelection]:
    """Return a path and the rows that its end selects; a file may have a name with brackets too.

    Raises TaskError for a step of 0.
    """
    found = _SELECTION.fullmatch(text)
    if found is None or Path(text).exists():
        return text, RowSelection()
    if found[2].count(":") == 2 and re.fullmatch(r"-?0+", found[2].rpartition(":")[2]):
        raise TaskError(f"tasks.path: {text} takes every 0th row")
    return found[1], RowSelection(found[2])


def read_places(path: Path) -> Iterator[RowLocation]:
    """Yield the rows of a file, of the files that a pattern names or of a folder of Parquet files.

    Files are .jsonl, .jsonl.gz, .json (a list or one row) or .parquet. Raises TaskError.
    """
    if path.is_dir():
        parts = sorted(path.glob("*.parquet"))
    else:
        parts = [path] if path.exists() else sorted(path.parent.glob(path.name))
    if not parts:
        raise TaskError(f"tasks.path: {path} is not a file, nor a folder of Parquet files")
    for part in parts:
        yield from _parquet_rows(part) if part.suffix == ".parquet" else _text_rows(part)


def _text_rows(path: Path) -> Iterator[RowLocation]:
    name = path.name.removesuffix(".gz")
    packed = name != path.name
    if not name.endswith((".jsonl", ".json", ".ndjson")):
        raise TaskError(f"tasks.path: {path} is no .jsonl, .jsonl.gz, .json or .parquet file")
    with boundary(TaskError, f"read {path}"):
        if name.endswith(".json"):
            yield from _read_list(path, gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
        elif packed:
            with gzip.open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield RowLocation(path=path, number=number, content=line)
        else:
            yield from _read_lines(path)


def _read_lines(path: Path) -> Iterator[RowLocation]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield RowLocation(path=path, number=number, offset=offset)
            offset += len(line)


def _read_list(path: Path, content: bytes) -> Iterator[RowLocation]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not JSON: {error}") from None
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield RowLocation(path=path, number=number, content=json.dumps(row).encode())


class TaskRow(BaseModel):
    """Base of all schemas: unused columns are ignored, used ones are checked strictly."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class OwnRow(TaskRow):
    """Base of insitu's own schemas, which know all their keys: another one is a mistake."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        fields = [str(name) for key, field in cls.model_fields.items() for name in _names(key, field)]
        for key in value if isinstance(value, dict) else ():
            if key not in fields:
                close = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(fields)}"
                raise ValueError(f"unknown key {ascii(key)[:60]}: {hint}")
        return value


def _names(key: str, field: FieldInfo) -> list[object]:
    alias = field.validation_alias
    return list(alias.choices) if isinstance(alias, AliasChoices) else [alias or key]


def _parse_ids(value: object) -> tuple[str, ...]:
    """Return test ids from a list, a JSON string or a Python literal: the data sets use all three.

    Raises ValueError for anything else; a string is never split into letters.
    """
    if isinstance(value, str):
        value = parse_literal(value)
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of test ids, not {type(value).__name__}")
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"must hold test ids, got {ascii(item)[:60]}")
    return tuple(dict.fromkeys(value))


def parse_literal(text: str) -> object:
    """JSON, or a Python literal. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"is neither a list nor JSON nor a Python literal: {ascii(text)[:60]}") from None


def parse_texts(value: object) -> tuple[str, ...]:
    """Commands or names: a list, a string that holds one as JSON or as a Python literal, or one text."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return (value,)
        try:
            value = parse_literal(value)
        except ValueError:
            return (str(value),)  # `[ -f x ]` is a command too
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a text or a list of texts")
    return tuple(item for item in value if item.strip())


TestIds = Annotated[tuple[str, ...], BeforeValidator(_parse_ids)]
OwnIds = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: () if value in (None, "") else _parse_ids(value))
]
"""The same where ids may be left out: null and an empty text are none."""
Texts = Annotated[tuple[str, ...], BeforeValidator(parse_texts)]
Text = Annotated[str, Field(min_length=1)]


def row_id(row: RawRow) -> str:
    """Return the id of a row for error messages; empty without one."""
    for key in ("instance_id", "task_id", "id", "name"):
        value = row.get(key)
        if isinstance(value, str | int):
            return str(value)
    inner = row.get("metadata")
    return row_id(inner) if isinstance(inner, dict) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParquetLocation(RowLocation):
    """Position of a row in a Parquet file."""

    group: int
    """Row group."""
    index: int
    """Row within the group, from 0."""

    def row(self) -> RawRow:
        rows: list[dict[str, Any]] = _group(self.path, self.group).slice(self.index, 1).to_pylist()
        return rows[0]


def _parquet_rows(path: Path) -> Iterator[RowLocation]:
    """Yield the rows of a file; raise TaskError for an unreadable one, SetupError without pyarrow."""
    number = 0
    file = _open(path)
    for group in range(file.num_row_groups):
        for index in range(file.metadata.row_group(group).num_rows):
            number += 1
            yield _ParquetLocation(path=path, number=number, group=group, index=index)


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise SetupError(f"{path}: Parquet files need pyarrow; {install_extra('parquet')}") from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise TaskError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from error


@lru_cache(maxsize=2)
def _group(path: Path, group: int) -> Any:
    return _open(path).read_row_group(group)
