"""The viewer's benchmark ends with its figures as one JSON object."""

from __future__ import annotations

import json

import pytest

from benchmarks import view

pytestmark = pytest.mark.slow


def test_it_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert view.main(["--rollouts", "160", "--live-s", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(figures) == [
        "overview_s",
        "list_s",
        "facets_s",
        "sort_s",
        "tokens_page_s",
        "tokens_main_thread_ms",
        "served_bytes",
        "live_core_share",
    ]
    assert figures["tokens_main_thread_ms"] is None
    assert all(figures[name] > 0 for name in figures if name != "tokens_main_thread_ms")
