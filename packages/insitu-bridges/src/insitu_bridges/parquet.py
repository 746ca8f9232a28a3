"""Exported rollouts as Parquet: data/rows.parquet and data/rollouts.parquet, zstd, 64 rows per row group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from insitu.errors import RecordError, SetupError, boundary
from insitu.install_hints import install_extra
from insitu_bridges.records import OPTIONAL, ROLLOUTS, ROWS, Record

GROUP_ROWS = 64
TABLES: Mapping[str, Mapping[str, str]] = {"rows": ROWS, "rollouts": ROLLOUTS}
FILES = tuple(f"data/{name}.parquet" for name in TABLES)


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SetupError(f"Parquet files need pyarrow; {install_extra('parquet')}") from error
    return pyarrow


class ParquetWriter:
    """Writes both tables; a context manager."""

    def __init__(self, folder: Path, metadata: Mapping[str, str]) -> None:
        """Open the files. Raises SetupError without pyarrow."""
        _arrow()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        self._rollouts = _TableWriter(folder / FILES[1], ROLLOUTS, metadata)
        self._rows = _TableWriter(folder / FILES[0], ROWS, metadata)

    def add(self, record: Record, rows: Sequence[Record]) -> None:
        """Write one rollout."""
        self._rollouts.add(record)
        for row in rows:
            self._rows.add(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for table in (self._rollouts, self._rows):
            table.close()


class _TableWriter:
    def __init__(self, path: Path, columns: Mapping[str, str], metadata: Mapping[str, str]) -> None:
        arrow = _arrow()
        self._columns, self._held = columns, list[Record]()
        self._schema = arrow.schema(
            [(name, _type(kind)) for name, kind in columns.items()],
            metadata={f"insitu.{key}": value for key, value in metadata.items()},
        )
        # Sampled numbers hardly repeat: a dictionary would only be tried and given up.
        repeated = [name for name, kind in columns.items() if kind != "floats"]
        self._writer = arrow.parquet.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=repeated
        )

    def add(self, record: Record) -> None:
        self._held.append(record)
        if len(self._held) == GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        columns = [
            _column([record[name] for record in self._held], kind) for name, kind in self._columns.items()
        ]
        table = _arrow().Table.from_arrays(columns, schema=self._schema)
        self._writer.write_table(table, row_group_size=GROUP_ROWS)
        self._held.clear()

    def close(self) -> None:
        if self._held:
            self._flush()
        self._writer.close()


def _type(kind: str) -> Any:
    pa = _arrow()
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    types = {
        "int": pa.int32(),
        "float": pa.float64(),
        "text": pa.string(),
        "json": pa.string(),
        "ints": pa.list_(pa.int32()),
        "bools": pa.list_(pa.bool_()),
        "floats": pa.list_(pa.float32()),
        "messages": pa.list_(message),
    }
    return types[kind]


def _column(values: Sequence[Any], kind: str) -> Any:
    pa = _arrow()
    if kind == "json":
        return pa.array([None if v is None else orjson.dumps(v).decode() for v in values], pa.string())
    if kind not in ("ints", "bools", "floats"):
        return pa.array(values, _type(kind))
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
    items = pa.array(np.concatenate(values), _type(kind).value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), items)


def read_parquet(folder: Path) -> Iterator[tuple[Record, list[Record]]]:
    """Yield the records of an export. Raises RecordError for files that are not of one."""
    rows = _records(folder / FILES[0], ROWS)
    for record in _records(folder / FILES[1], ROLLOUTS):
        yield record, list(islice(rows, record["rows"]))
    if next(rows, None) is not None:
        raise RecordError(f"{folder / FILES[0]} has rows without a rollout")


def _records(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    arrow = _arrow()
    with boundary(RecordError, f"read {path}"), arrow.parquet.ParquetFile(path) as file:
        lacking = [name for name in columns if name not in file.schema_arrow.names]
        if needed := [name for name in lacking if name not in OPTIONAL]:
            raise RecordError(f"{path} has no column {needed[0]}: it is not an export of insitu")
        columns = {name: kind for name, kind in columns.items() if name not in lacking}
        for name, kind in columns.items():
            if (found := file.schema_arrow.field(name).type) != _type(kind):
                raise RecordError(f"{path}: column {name} has type {found}, not {_type(kind)}")
        for batch in file.iter_batches(GROUP_ROWS, columns=list(columns)):
            values = {name: _values(batch.column(name), kind) for name, kind in columns.items()}
            for index in range(len(batch)):
                yield {name: column[index] for name, column in values.items()}


def _values(column: Any, kind: str) -> Sequence[Any]:
    """Return the values of a column. Lists are views of one array."""
    if kind == "json":
        return [None if text is None else orjson.loads(text) for text in column.to_pylist()]
    if kind not in ("ints", "bools", "floats"):
        found: list[Any] = column.to_pylist()
        return found
    if column.null_count or column.values.null_count:
        raise ValueError("a list has gaps")
    offsets = column.offsets.to_numpy()
    items = column.values.to_numpy(zero_copy_only=False)
    return [items[start:stop] for start, stop in pairwise(offsets)]
