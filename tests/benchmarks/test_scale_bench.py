"""The benchmarks of fleets print what they promise."""

from __future__ import annotations

import gc
import json

import pytest

from benchmarks import fleet, scale

pytestmark = pytest.mark.slow


def test_scale_measures_the_controller(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--sessions", "64", "--machines", "4", "--rollouts", "32"]
    threshold = gc.get_threshold()
    assert scale.main(words) == 0
    assert gc.get_threshold() == threshold
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"sessions", "cores", "gib", "rollouts_per_s", "commit_s"}
    assert found["sessions"] == 64
    assert min(found.values()) >= 0


def test_nodes_that_answer_at_once_are_measured() -> None:
    found = fleet.measured(2, 4, ["fleet.kind=processes"])
    assert set(found) == {"added_ms", "rollouts_per_s"}
    assert min(found.values()) > 0
