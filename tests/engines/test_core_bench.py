"""The benchmark runs and says what it measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine import main

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_the_benchmark_prints_ratios_and_fails_below_the_wanted_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--prompt-tokens", "48", "--tokens", "2", "--repeats", "1", "--vocab", "64"]
    assert main([*small, "--at-least", "1e9"]) == 1
    result = json.loads(capsys.readouterr().out)
    shapes = {f"{shape}_{batch}" for shape in ("call", "decode") for batch in (1, 8, 32)}
    shapes |= {f"{shape}_{batch}" for shape in ("group", "conversation") for batch in (8, 32)}
    assert set(result["ratios"]) == shapes
    assert all(rate["tokens_s"] > 0 and rate["tokens_s_wall"] > 0 for rate in result["rates"])
    assert result["settings"]["threads"] == 1
