"""Rows of Parquet files; needs the extra `parquet` (pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from insitu.errors import SetupError, TaskError
from insitu.install_hints import install_extra
from insitu.tasks.row_files import RawRow, RowLocation


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


def parquet_rows(path: Path) -> Iterator[RowLocation]:
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
