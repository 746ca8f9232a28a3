"""`python -m benchmarks async` in small: the object it prints, and that running ahead pays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.async_ import Case, compare, simulate, variations

pytestmark = pytest.mark.slow

SMALL = Case(groups=4, group_size=4, workers=16, updates=12)


def test_the_last_line_has_the_four_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["async", "--updates", "4", "--seeds", "1", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(reported) == ["speedup", "trainer_idle", "wasted", "staleness_max"]
    assert reported["speedup"] > 1.0


def test_the_same_seed_gives_the_same_schedule_and_running_ahead_is_faster() -> None:
    assert simulate(SMALL, 1) == simulate(SMALL, 1)
    found = compare(SMALL, [0])
    assert found.speedup > 1.5
    assert found.idle < found.idle_sync
    assert found.staleness_max <= 2
    assert simulate(replace(SMALL, staleness=0), 0).staleness_max == 0


def test_no_run_gains_more_than_the_wait_of_the_baseline_allows() -> None:
    """What docs/asynchronous.md says of longer training: it leaves less to gain, however little is waited."""
    for train_s in (240.0, 960.0):
        case = replace(SMALL, train_s=train_s)
        sync, found = simulate(replace(case, staleness=0), 0), compare(case, [0])
        most = sync.wall_s / (case.updates * (train_s + case.publish_s))
        assert found.speedup <= most
    assert found.speedup > 0.95 * most


def test_the_documented_table_leaves_no_line_out() -> None:
    text = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text()
    rows = text.split("| against S = 0 |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(variations(Case()))
    for seconds in (180, 300, 360):
        assert any(f"{seconds} s of training" in row for row in rows)
