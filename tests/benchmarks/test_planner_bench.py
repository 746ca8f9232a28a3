"""The planner's benchmark: its workload is what it says, and it ends with the JSON object."""

from __future__ import annotations

import json

import pytest

from benchmarks import planner
from insitu.errors import TrainError
from insitu_train.plan.prefix import Sorted, sort_rows

pytestmark = pytest.mark.slow


def test_it_prints_seconds_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rollouts", "16", "--tokens", "20000", "--budget", "30000", "--repeats", "2"]
    assert planner.main([*sizes, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["seconds", "tokens"]
    assert result["tokens"] == 16 * 20_000
    assert result["seconds"] > 0
    assert "in 20 rows" in lines[1]


def test_a_wrong_order_and_a_wrong_prefix_are_found() -> None:
    groups = planner.workload(planner.Shape(rollouts=8, tokens=12_000))
    rows = [s.ids for g in groups for r in g.rollouts for s in r.trajectory.segments]
    found = sort_rows(rows)
    planner.check(rows, found)
    turned = Sorted(found.order[::-1], (0, *found.shared[:0:-1]))
    longer = Sorted(found.order, (0, *(n + 1 for n in found.shared[1:])))
    shorter = Sorted(found.order, (0, *(n - 1 for n in found.shared[1:])))
    for wrong in (turned, longer, shorter):
        with pytest.raises(TrainError):
            planner.check(rows, wrong)
