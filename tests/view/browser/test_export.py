"""An exported report in a browser: opened from disk, with no request but itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from addresses import FOREIGN, HOSTILE, ROLLOUT, addresses, task_of
from browser_lab import WAIT_MS, Tab

from insitu.view.web.export import ExportOptions, export

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def written(run: Path, file: Path) -> Path:
    export(
        ExportOptions(
            paths=[run], file=file, rollouts="all", redact=[], tokens=True, checks=True, max_mib=25
        ),
        sys.stderr,
    )
    return file


@pytest.fixture
def tab(browser: Any, runs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tab]:
    file = written(runs / request.param, tmp_path / "report.html").as_uri()
    context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    tab = Tab(page, file)
    page.on("console", lambda m: m.type in ("error", "warning") and tab.problems.append(f"console: {m.text}"))
    page.on("pageerror", lambda error: tab.problems.append(f"error: {error}"))
    page.on(
        "request", lambda r: r.url.startswith((file, "data:")) or tab.problems.append(f"request: {r.url}")
    )
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', event =>"
        " (window.violations ??= []).push(event.violatedDirective + ' ' + event.sample))"
    )
    page.goto(file)
    yield tab
    context.close()


def open_page(tab: Tab, address: str) -> None:
    tab.page.evaluate("address => { location.hash = address; }", address)
    tab.settled()
    tab.page.wait_for_timeout(100)


@pytest.mark.parametrize("tab", ["lab", HOSTILE], indirect=True)
def test_every_page_opens_from_disk_and_runs_nothing(
    tab: Tab, runs: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["tab"]
    known = addresses(name, task_of(runs / name))
    open_page(tab, known["group"])
    # The file holds the comparisons that its pages link to.
    known["pair"] = tab.page.locator("main a[href*=compare]").first.get_attribute("href")
    for page, address in known.items():
        open_page(tab, address)
        shown = tab.page.text_content("main")
        assert "not in the exported file" not in shown, page
        assert tab.page.locator("h1").count() == 1, page
        foreign = tab.page.evaluate(FOREIGN)
        assert foreign == {"pwned": None, "violations": [], "made": 0, "links": []}, page
    assert tab.problems == []


@pytest.mark.parametrize("tab", ["lab"], indirect=True)
def test_overview_rollout_and_tokens_are_shown(tab: Tab) -> None:
    assert "56 of 56 rollouts are here whole" in tab.page.text_content(".exported")
    open_page(tab, "#/lab")
    assert "Look at these" in tab.page.text_content("main")
    open_page(tab, f"#/lab/rollout/{ROLLOUT}")
    tab.page.wait_for_selector(".transcript")
    open_page(tab, f"#/lab/rollout/{ROLLOUT}?tab=tokens")
    tab.page.wait_for_selector(".tokpage")
    open_page(tab, "#/lab/rollouts?outcome=unresolved&sort=-agent_s")
    assert "resolved" in tab.page.text_content("main")
    assert tab.problems == []
