"""`whet bench long` on a CPU: a step of a small shape, its prediction, the form of its line."""

from __future__ import annotations

import json

import pytest

from whet.bench import long


def test_a_small_case_is_measured_and_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    assert long.main(["--json", "--models", "3m", "--tokens", "256", "--repeats", "1", "--no-peers"]) == 0
    cases = json.loads(capfd.readouterr().out.strip().splitlines()[-1])["cases"]
    assert [c["tokens"] for c in cases] == [256, 256]
    for case in cases:
        assert {"model", "tokens", "peak_gib", "predicted_gib", "tokens_per_s", "peers"} <= case.keys()
        assert case["predicted_gib"] == pytest.approx(case["peak_gib"], rel=0.05)
        assert case["tokens_per_s"] > 0
