"""A viewer beside a run that is being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_lab import Served, Tab, open_tab, serve
from run_lab import Flavour, make_rollout, make_run

from insitu.storage.run_dir import RunDir

pytestmark = [pytest.mark.browser, pytest.mark.slow]
ARRIVES_MS = 3000
"""From the commit of a rollout to its row, as the design promises; checked by a wait, not by a clock."""


@pytest.fixture
def live_run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "live", steps=20)


@pytest.fixture
def live(browser: Any, live_run: Path) -> Iterator[Tab]:
    for served in serve(live_run):
        yield from open_tab(browser, served)


def put(run: Path, number: int) -> str:
    """Commit one more rollout as a training process would; return its id."""
    rollout = make_rollout(Flavour(), "late", 99, number, 0, solved=True)
    with RunDir.open(run) as directory, directory.store() as store:
        store.put_rollout("late", 99, number, 0, replace(rollout, category="late"))
    return rollout.id


def test_a_new_rollout_appears_by_itself(live: Tab, live_run: Path) -> None:
    live.open("#/live/rollouts")
    live.page.wait_for_selector(".window tbody tr td.id a")
    name = put(live_run, 0)
    live.page.wait_for_selector(f".window td.id a:has-text('{name}')", timeout=ARRIVES_MS)
    assert live.problems == []


def test_what_is_read_does_not_move(live: Tab, live_run: Path) -> None:
    live.open("#/live/rollouts")
    live.page.wait_for_selector(".window tbody tr td.id a")
    live.page.evaluate("document.querySelector('.window').scrollTop = 2000")
    live.page.wait_for_timeout(200)
    seen = (
        "() => [document.querySelector('.window').scrollTop,"
        " [...document.querySelectorAll('.window td.id')].map(e => e.textContent).join()]"
    )
    before = live.page.evaluate(seen)
    put(live_run, 0)
    live.page.wait_for_selector("button:has-text('1 new')", timeout=ARRIVES_MS)
    assert live.page.evaluate(seen) == before
    live.page.get_by_role("button", name="1 new").click()
    live.page.evaluate("document.querySelector('.window').scrollTop = 0")
    live.page.wait_for_selector(".window td.id a:has-text('late/00099/000/00')")
    assert live.problems == []


def test_a_run_that_starts_after_the_viewer_is_listed(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for served in serve(folder):
        for tab in open_tab(browser, served):
            tab.open("#/")
            assert "There is no run here yet" in tab.page.text_content("main")
            make_run(folder / "first")
            tab.open("#/first")
            tab.page.wait_for_selector("h2:has-text('Is it learning?')")
            assert tab.problems == []


def test_a_restarted_viewer_says_what_to_do(browser: Any, runs: Path, served: Served) -> None:
    for tab in open_tab(browser, served):
        tab.page.context.clear_cookies()
        tab.page.evaluate("location.hash = '#/lab/health'")
        tab.page.wait_for_selector("text=open the address that")
