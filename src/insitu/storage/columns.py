"""Fields of a dataclass in the columns of a table: the schema is the map.

A column holds the field of its name, or the one that it is renamed to; the annotation of the field says how
it is written. Token ids are little-endian int32 blobs, log-probabilities float32, masks one byte per token,
experts a compressed .npy file, containers JSON. NULL stands for the field's default where a column may be
NULL: columns that a later schema added read so in an older store.
"""

from __future__ import annotations

import enum
import functools
import io
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import orjson

from insitu.errors import RecordError
from insitu.storage.schema import nullable_columns
from insitu.types import ExpertArray
from insitu.types.codec import dtype_of, dumps, reader

T = TypeVar("T")
Row = Mapping[str, Any]
Change = Callable[[Any], Any]
_SAME = frozenset({int, float, str, bytes})
"""Types that SQLite holds as they are."""


class _Column(NamedTuple):
    """One field in one column."""

    name: str
    field: str
    default: Any
    """What NULL stands for; MISSING = the column is never NULL."""
    write: Change | None
    read: Change | None
    """None = SQLite holds the value as it is."""


class TableColumns(Generic[T]):
    """The fields of `kind` that have a column in a table."""

    def __init__(self, table: str, kind: type[T], **renamed: str) -> None:
        """Find the columns. renamed: column -> field, where the names differ."""
        self._table, self._kind = table, kind
        nullable, hints = nullable_columns(table), get_type_hints(kind)
        known = {name for name in hints if name not in renamed.values()}
        found = {name: renamed.get(name, name) for name in nullable}
        described: Any = kind
        defaults = {f.name: _default(f) for f in fields(described)}
        self._columns = tuple(
            _Column(name, of, defaults[of] if nullable[name] else MISSING, *_changes(hints[of]))
            for name, of in found.items()
            if name in renamed or of in known
        )

    def write(self, value: T) -> dict[str, Any]:
        """Return column -> value."""
        row: dict[str, Any] = {}
        for name, field, default, change, _ in self._columns:
            item = getattr(value, field)
            if item is None or (default is not MISSING and type(item) is type(default) and item == default):
                row[name] = None
            else:
                row[name] = item if change is None else change(item)
        return row

    def fields_of(self, row: Row) -> dict[str, Any]:
        """Return field -> value; arrays are read-only views. Raises RecordError."""
        found: dict[str, Any] = {}
        for name, field, default, _, change in self._columns:
            item = row[name]
            if item is None:
                found[field] = default
            else:
                try:
                    found[field] = item if change is None else change(item)
                except (ValueError, zlib.error) as error:
                    raise RecordError(f"column {self._table}.{name}: {error}") from error
        return found

    def read(self, row: Row, **more: Any) -> T:
        """Return the value of a row, with fields that have no column of their own."""
        return self._kind(**self.fields_of(row), **more)


def _default(field: Field[Any]) -> Any:
    if field.default is MISSING:
        return None if field.default_factory is MISSING else field.default_factory()
    return field.default


def _changes(hint: Any) -> tuple[Change | None, Change | None]:
    """Return how a field of an annotation is written and read."""
    if get_origin(hint) is types.UnionType:
        [hint] = [option for option in get_args(hint) if option is not types.NoneType]
    if (dtype := dtype_of(hint)) is not None:
        if dtype == np.int16:
            return pack_experts, unpack_experts
        if dtype == np.bool_:
            return lambda mask: mask.astype(np.uint8).tobytes(), functools.partial(np.frombuffer, dtype=dtype)
        little = dtype.newbyteorder("<")
        read = functools.partial(np.frombuffer, dtype=little)
        return lambda array: array.astype(little, casting="safe", copy=False).tobytes(), read
    if hint is bool:
        return int, bool
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return lambda item: item.value, hint
    if hint in _SAME or get_origin(hint) is Literal:
        return None, None
    one = reader(hint)

    def parse(text: str) -> Any:
        return one(orjson.loads(text))

    # The version runs of all turns are mostly the same text.
    once = functools.lru_cache(1024)(parse) if get_origin(hint) is tuple else parse
    return lambda item: dumps(item).decode(), once


def pack_experts(experts: ExpertArray) -> bytes:
    """Return a compressed .npy file."""
    out = io.BytesIO()
    np.save(out, experts.astype("<i2", casting="safe"))
    return zlib.compress(out.getvalue(), 1)


def unpack_experts(blob: bytes) -> ExpertArray:
    """Return what `pack_experts` packed. Raises ValueError and zlib.error for anything else."""
    found: ExpertArray = np.load(io.BytesIO(zlib.decompress(blob)))
    found.flags.writeable = False
    return found
