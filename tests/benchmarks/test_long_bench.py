"""`python -m benchmarks long` on a CPU: a step of a small shape, its prediction, the form of its line."""

from __future__ import annotations

import json

import pytest

from benchmarks import long
from benchmarks.long import Case

pytestmark = pytest.mark.slow

PRINTED = [
    "model",
    "tokens",
    "peak_gib",
    "predicted_gib",
    "tokens_per_s",
    "peers",
    "memory_gib",
    "techniques",
]


@pytest.mark.full
def test_a_small_case_is_measured_and_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    assert long.main(["--json", "--models", "3m", "--tokens", "256", "--repeats", "1", "--no-peers"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert list(result) == ["cases"]
    cases = result["cases"]
    assert [c["tokens"] for c in cases] == [256, 256]
    for case in cases:
        assert list(case) == PRINTED
        assert case["predicted_gib"] == pytest.approx(case["peak_gib"], rel=0.05)
        assert case["tokens_per_s"] > 0


def test_what_did_not_run_has_no_figures() -> None:
    reported = Case(model="4b", tokens=1 << 20, predicted_gib=200.0, error="out of memory").reported()
    assert list(reported) == PRINTED
    assert (reported["peak_gib"], reported["predicted_gib"], reported["tokens_per_s"]) == (None, 200.0, None)


def test_a_row_of_152k_tokens_is_expected_to_fit_in_40_gib() -> None:
    assert ("0.6b", 152_000, 40.0) in long.ON_GPU
    free, bound = (long.expected("0.6b", 152_000, gib) for gib in (0.0, 40.0))
    assert free["predicted_gib"] > 40.0, "the fastest that fits an H200 says nothing of 40 GiB"
    assert bound["predicted_gib"] <= 40.0
    assert bound["techniques"] != free["techniques"]
