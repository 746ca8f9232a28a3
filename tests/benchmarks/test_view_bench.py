"""The viewer's benchmark ends with its figures as one JSON object."""

from __future__ import annotations

import json

import pytest

from benchmarks import view

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_it_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert view.main(["--rollouts", "160", "--live-s", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures) >= {
        "overview_s",
        "list_s",
        "facets_s",
        "sort_s",
        "tokens_page_s",
        "tokens_main_thread_ms",
        "served_bytes",
        "live_core_share",
    }
    # Shares of a second are 0 where the clock of the process did not move; without a browser, some are None.
    assert all(value is None or value >= 0 for value in figures.values())
    assert figures["overview_s"] > 0
