"""The gateway's benchmark runs, calls what it says it calls, and prints what the issue asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.bench import _corpus
from whet.bench.gateway import Shape, measure, medians, summary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _corpus.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_round_measures_steady_calls_of_the_size(model: Path, stream: bool) -> None:
    shape = Shape(size="50KB", concurrency=2, sessions=3, turns=2, stream=stream)
    cell = measure(model, shape)
    assert cell["calls"] == 6
    assert 45_000 < cell["body_bytes"] < 55_000
    assert 0 < cell["p50"] <= cell["p99"]
    assert cell["cpu_ms"] > 0
    assert cell["family_ms"] > 0
    assert cell["held_tokens"] > 3 * 10_000


def test_the_last_line_has_the_promised_fields() -> None:
    cell = {
        "cpu_ms": 1.0,
        "family_ms": 0.5,
        "p50": 2.0,
        "p99": 3.0,
        "calls_per_s": 4.0,
        "bytes_per_token": 5.0,
    }
    line = summary({"50KB/1": medians([cell, cell]), "400KB/1": cell}, (0.0, 0.0, 0.0))
    assert {"cpu_ms", "added_ms", "calls_per_s", "bytes_per_token", "load_average", "peers"} <= set(line)
    assert line["added_ms"] == {"50KB": {"p50": 2.0, "p99": 3.0}, "400KB": {"p50": 2.0, "p99": 3.0}}
