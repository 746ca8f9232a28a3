"""The benchmark of curricula trains with both samplers on the same tasks and compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import curriculum

pytestmark = pytest.mark.slow


def test_the_unsolvable_tasks_are_spread_over_the_set(tmp_path: Path) -> None:
    curriculum.write_tasks(tmp_path / "tasks.jsonl", 8, 3)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert ["gold" in row for row in rows] == [True, True, False, True, True, False, True, False]
    assert len({row["prompt"] for row in rows}) > 1


@pytest.mark.full
def test_it_compares_the_samplers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tasks", "4", "--unsolvable", "2", "--steps", "1", "--heldout", "2", "--seeds", "1"]
    assert curriculum.main([*sizes, "--out", str(tmp_path), "--json"]) == 0
    sides = json.loads(capsys.readouterr().out.splitlines()[-1])["unsolvable"]["2"]
    assert list(sides) == ["epochs", "signal"]
    for side in sides.values():
        assert list(side["heldout"]) == ["0", "1"]
        assert 0 <= side["effective"] <= 1
    assert sides["epochs"]["heldout"]["0"] == sides["signal"]["heldout"]["0"]
    assert curriculum.main([*sizes, "--out", str(tmp_path), "--json"]) == 0
