"""Rollouts and steps of a run as tables for notebooks: lazy rows, numpy columns, data frames and HTML."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, overload

import numpy as np

from insitu.errors import ConfigError
from insitu.install_hints import install_package
from insitu.progress.base import printable
from insitu.storage.queries import PAGE, PHASES, RunReader
from insitu.storage.store import StepRecord, Store
from insitu.types import Rollout

SHOWN_ROWS = 20
FRAMES = ("pandas", "polars")
"""Packages of data frames; the first that is installed is used."""
_NESTED = ("excluded", "dropped", "row")
"""Fields of a list row that are no column."""
_HTML = ("id", "task", "status", "outcome", "reward", "calls", "sampled", "trained", "reason", "error")


class Columns:
    """What every table offers, from `_columns`."""

    def _columns(self) -> Mapping[str, Sequence[Any]]:
        raise NotImplementedError

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns())

    def column(self, name: str) -> np.ndarray:
        """Return a column: numbers as float64 with NaN for what is missing, else objects.

        Raises ConfigError for an unknown name.
        """
        found = self._columns()
        if name not in found:
            raise ConfigError(f"no column {name}; there are: {', '.join(found)}")
        values = found[name]
        if all(isinstance(value, int | float | None) for value in values):
            return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        return np.array(values, dtype=object)

    def frame(self) -> Any:
        """Return a data frame of pandas, or else of polars.

        Raises ConfigError where neither is installed.
        """
        for name in FRAMES:
            if find_spec(name) is not None:
                frame: Callable[..., Any] = importlib.import_module(name).DataFrame
                return frame({name: list(values) for name, values in self._columns().items()})
        raise ConfigError(f"neither pandas nor polars is installed: {install_package('pandas')}")

    def _html(self, names: Sequence[str], count: int) -> str:
        columns = {name: values for name, values in self._columns().items() if name in names}
        rows = list(zip(*(values[:SHOWN_ROWS] for values in columns.values()), strict=True))
        more = f"<p>{SHOWN_ROWS} of {count}</p>" if count > SHOWN_ROWS else ""
        return html_table(tuple(columns), rows) + more


def html_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table of text: agents write what is in it."""

    def cells(tag: str, values: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escaped(value)}</{tag}>" for value in values) + "</tr>"

    return f"<table>{cells('th', names)}{''.join(cells('td', row) for row in rows)}</table>"


def escaped(value: object) -> str:
    """Return text for HTML, with a question mark for each control and direction character."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    return html.escape(printable("" if value is None else value))


class StepTable(list[StepRecord], Columns):
    """Committed optimizer steps; columns are `step`, `committed_s` and every metric."""

    def _columns(self) -> Mapping[str, Sequence[Any]]:
        names = list(dict.fromkeys(name for step in self for name in step.metrics))
        return {
            "step": [step.step for step in self],
            "committed_s": [step.committed_s for step in self],
            **{name: [step.metrics.get(name) for step in self] for name in names},
        }

    def _repr_html_(self) -> str:
        return self._html(("step", "reward_mean", "solve_rate", "loss", "entropy", "step_s"), len(self))


class Rollouts(Sequence[Rollout], Columns):
    """Stored rollouts that match filters. Columns need no tokens; a rollout is read when it is asked for."""

    def __init__(self, path: Path, filters: Mapping[str, object], rows: list[dict[str, Any]] | None = None):
        """Take a run directory and filters of `storage.queries`; nothing is read yet."""
        self._path, self._filters, self._found = path, dict(filters), rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Facts of each rollout as in the viewer's lists (docs/viewer-api.md, ROW), read once."""
        if self._found is None:
            with RunReader(self._path) as reader:
                order = {(row["phase"], row["step"]): n for n, row in enumerate(reader.all(PHASES))}
                found = list(_pages(reader, self._filters))
            found.sort(key=lambda row: (order[row["phase"], row["step"]], row["group"], row["slot"]))
            self._found = found
        return self._found

    @property
    def ids(self) -> list[str]:
        return [row["id"] for row in self.rows]

    def _columns(self) -> Mapping[str, Sequence[Any]]:
        names = [name for name in (self.rows[0] if self.rows else {}) if name not in _NESTED]
        return {name: [row.get(name) for row in self.rows] for name in names}

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Rollout: ...

    @overload
    def __getitem__(self, at: slice) -> Rollouts: ...

    def __getitem__(self, at: int | slice) -> Rollout | Rollouts:
        if isinstance(at, slice):
            return Rollouts(self._path, self._filters, self.rows[at])
        with Store(self._path / "run.sqlite", readonly=True) as store:
            return store.rollout(self.rows[at]["id"])

    def __repr__(self) -> str:
        return f"<{len(self)} rollouts of {self._path.name}>"

    def _repr_html_(self) -> str:
        return self._html(_HTML, len(self))


def _pages(reader: RunReader, filters: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    cursor = ""
    while True:
        page = reader.page(filters, sort="id", cursor=cursor, limit=PAGE)
        yield from page.rows
        if not (cursor := page.next):
            return


class Text(str):
    """Text that a notebook shows as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return "<pre>" + "\n".join(escaped(line) for line in self.splitlines()) + "</pre>"
