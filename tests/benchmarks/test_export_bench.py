"""The benchmark of exports ends with its figures as one JSON object."""

from __future__ import annotations

import json

import pytest

from benchmarks import export

pytestmark = pytest.mark.slow


def test_it_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--rollouts", "1", "--turns", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ["bit_equal", "bytes_per_token", "tokens_per_s", "peak_gib", "rollouts", "tokens"]
    assert list(figures) == names
    assert figures["bit_equal"] is True
    assert figures["rollouts"] == 256
    assert figures["bytes_per_token"] < 4
