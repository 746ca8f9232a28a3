"""`whet bench async` in small: the object it prints, and that running ahead pays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from whet import cli
from whet.bench.async_ import Case, compare, simulate

SMALL = Case(groups=4, group_size=4, workers=16, updates=12)


def test_the_last_line_has_the_four_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "async", "--updates", "4", "--seeds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told) == ["speedup", "trainer_idle", "wasted", "staleness_max"]
    assert told["speedup"] > 1.0


def test_the_same_seed_gives_the_same_schedule_and_running_ahead_is_faster() -> None:
    assert simulate(SMALL, 1) == simulate(SMALL, 1)
    found = compare(SMALL, [0])
    assert found.speedup > 1.5
    assert found.idle < found.idle_sync
    assert found.staleness_max <= 2
    assert simulate(replace(SMALL, staleness=0), 0).staleness_max == 0
