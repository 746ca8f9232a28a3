"""The gateway's benchmark runs, calls what it says it calls, and prints what the issue asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _corpus, _peers, gateway
from benchmarks.gateway import Shape, measure, medians, summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _corpus.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_round_measures_steady_calls_of_the_size(model: Path, stream: bool) -> None:
    shape = Shape(size="50KB", concurrency=2, sessions=3, turns=2, stream=stream)
    cell = measure(model, shape)
    assert cell["calls"] == 6
    assert 45_000 < cell["body_bytes"] < 55_000
    assert 0 < cell["p50"] <= cell["p99"]
    assert cell["cpu_ms"] > 0
    assert cell["tokenizer_ms"] > 0
    assert cell["held_tokens"] > 3 * 10_000


def cell(**changed: float) -> dict[str, float]:
    values = {
        "cpu_ms": 1.0,
        "tokenizer_ms": 0.5,
        "p50": 2.0,
        "p99": 3.0,
        "calls_per_s": 4.0,
        "bytes_per_token": 5.0,
    }
    return {**values, **changed}


def test_the_last_line_has_the_promised_fields() -> None:
    cells = {"50KB/1": medians([cell(), cell()]), "400KB/1": cell(calls_per_s=9.0, bytes_per_token=1.0)}
    line = summary(cells, (0.5,), {"tokens": 1}, {"other": {"skipped": "why"}})
    assert {"cpu_ms", "added_ms", "calls_per_s", "bytes_per_token", "load_average", "peers"} <= set(line)
    assert line["added_ms"] == {"50KB": {"p50": 2.0, "p99": 3.0}, "400KB": {"p50": 2.0, "p99": 3.0}}
    assert line["peers"] == {"other": {"skipped": "why"}}


def test_memory_and_rate_are_those_of_one_named_shape_and_not_the_best_of_all() -> None:
    cells = {"50KB/1": cell(), "400KB/1": cell(calls_per_s=9.0, bytes_per_token=1.0)}
    line = summary(cells, (0.5,), {}, {})
    assert (line["bytes_per_token"], line["bytes_per_token_at"]) == (5.0, "50KB/1")
    assert (line["calls_per_s"], line["calls_per_s_at"]) == (4.0, "50KB/1")
    cells["50KB/32"] = cell(calls_per_s=2.0)
    assert summary(cells, (0.5,), {}, {})["calls_per_s"] == 2.0


def test_a_conversation_is_measured_while_it_grows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "GROWTH", 2)
    grown = gateway.growth(model)
    first, last = grown["stages"]
    assert grown["turns"] == 21
    assert 15_000 < first["body_bytes"] < last["body_bytes"] - 30_000
    assert min(first["cpu_ms"], last["cpu_ms"]) > 0


@pytest.mark.full
def test_a_gateway_of_others_that_cannot_be_had_is_left_out_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is measured all the same, through the same engine server over HTTP."""
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(
        _peers, "PEERS", (_peers.Peer(name="gone", requirement="insitu-no-such-peer==0.0.0"),)
    )
    shape = Shape(size="50KB", concurrency=1, sessions=1, turns=2, stream=False)
    reported = _peers.compare(model, {"50KB": (shape.job({}), 1)}, 1)
    assert "cannot be installed" in reported["gone"]["skipped"]
    ours = reported["insitu"]
    assert ours["shapes"]["50KB/1"]["calls"] == 2
    assert ours["cpu_ms"]["50KB"] > 0
    gateway.report_peers(reported)
    line = summary({}, (), {}, reported)
    assert set(ours) <= set(line), "a peer's fields are called as ours"


def test_a_peers_figures_are_by_field_and_then_by_size() -> None:
    reported = _peers.reported({"50KB": cell(), "400KB": cell(cpu_ms=7.0, p99=9.0, calls_per_s=1.0)})
    assert reported["cpu_ms"] == {"50KB": 1.0, "400KB": 7.0}
    assert reported["added_ms"] == {"50KB": {"p50": 2.0, "p99": 3.0}, "400KB": {"p50": 2.0, "p99": 9.0}}
    assert (reported["calls_per_s"], reported["calls_per_s_at"]) == (4.0, "50KB/1")
    assert reported["bytes_per_token"] is None
