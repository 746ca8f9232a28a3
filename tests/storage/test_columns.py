"""Each field of a rollout has a column, or is named here; what a column holds is read or refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from helpers_record import make_rollout

from insitu.errors import RecordError
from insitu.storage import rollout_rows
from insitu.storage.columns import TableColumns
from insitu.storage.store import Store
from insitu.types import CallTimes, FileEntry, Rollout, Segment, Trajectory, Turn, Verdict
from insitu_bridges import records


def names(kind: Any) -> set[str]:
    return {one.name for one in fields(kind)}


def held(made: TableColumns[Any]) -> set[str]:
    return {column.field for column in made._columns}


@pytest.mark.parametrize(
    ("kind", "found", "apart"),
    [
        (Turn, held(rollout_rows._TURN), {"times", "hints", "advisory"}),
        (CallTimes, held(rollout_rows._TIMES), set()),
        (Segment, held(rollout_rows._SEGMENT), set()),
        (Verdict, held(rollout_rows._VERDICT), {"fail_to_pass", "pass_to_pass"}),
        (FileEntry, held(rollout_rows._FILE), set()),
        (Rollout, held(rollout_rows._ROLLOUT), {"trajectory", "verdict", "changed", "began_s", "diff"}),
        (
            Trajectory,
            held(rollout_rows._LEDGER) | held(rollout_rows._DRIFTS),
            {"segments", "turns"},
        ),
        (Segment, records._OF_SEGMENT.values(), {"rollout_id", "experts"}),
        (Rollout, records._OF_ROLLOUT.values(), {"trajectory", "verdict", "changed", "part"}),
    ],
)
def test_every_field_is_stored_and_exported(kind: Any, found: Collection[str], apart: set[str]) -> None:
    assert {*found} | apart == names(kind)
    assert not {*found} & apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    turn: int
    spans: tuple[str, ...] = ("a",)
    cached: int = 7
    other: list[int] = field(default_factory=list)


def test_null_is_the_default_where_a_column_may_be_null() -> None:
    made = TableColumns("turns", Thing)
    assert held(made) == {"turn", "spans", "cached"}
    assert made.write(Thing(turn=0)) == {"turn": 0, "spans": None, "cached": None}
    assert made.write(Thing(turn=0, spans=(), cached=0)) == {"turn": 0, "spans": "[]", "cached": 0}
    assert made.read({"turn": 1, "spans": None, "cached": None}) == Thing(turn=1)
    assert made.read({"turn": 1, "spans": "[]", "cached": 0}, other=[1]) == Thing(
        turn=1, spans=(), cached=0, other=[1]
    )


def test_a_renamed_column_must_name_a_field() -> None:
    with pytest.raises(KeyError, match="place"):
        TableColumns("turns", Thing, parent="place")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("turns SET version_runs = '[[0]]'", "column turns.version_runs: .* is not a list of 2"),
        ("turns SET version_runs = '[['", "column turns.version_runs: "),
        ("turns SET ids = x'000001'", "column turns.ids: buffer size"),
        ("rollouts SET ledger = '{\"held\":1}'", "column rollouts.ledger: Ledger has no held"),
        ("rollouts SET status = 'fine'", "column rollouts.status: 'fine' is not a valid Status"),
    ],
)
def test_a_damaged_column_is_refused_by_its_name(tmp_path: Path, change: str, line: str) -> None:
    path = tmp_path / "run.sqlite"
    with Store(path) as store:
        store.put_rollout("train", 1, 0, 0, make_rollout("a"))
    db = sqlite3.connect(path)
    db.execute(f"UPDATE {change}")
    db.commit()
    db.close()
    with Store(path, readonly=True) as store, pytest.raises(RecordError, match=line):
        store.rollout("a")
