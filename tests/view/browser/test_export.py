"""An exported report in a browser: opened from disk, with no request but itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from addresses import FOREIGN, HOSTILE, ROLLOUT, addresses, task_of
from browser_lab import WAIT_MS, Tab

from insitu.storage.queries import FILTERS, SORTS, RunReader
from insitu_view.web.export import export

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def written(run: Path, file: Path) -> Path:
    export([run], file, sys.stderr, rollouts="all", redact=[], tokens=True, checks=True, max_mib=25)
    return file


@pytest.fixture
def tab(browser: Any, runs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tab]:
    file = written(runs / request.param if request.param else runs, tmp_path / "report.html").as_uri()
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("tab", [""], indirect=True)
def test_runs_of_one_file_are_compared(tab: Tab) -> None:
    tab.settled()
    for box in tab.page.get_by_role("checkbox").all():
        box.check()
    tab.page.get_by_role("button", name="Compare 2 runs").click()
    tab.page.wait_for_selector("h1:has-text('Compare runs')")
    for names in (("lab", HOSTILE), (HOSTILE, "lab"), ("lab",)):
        open_page(tab, "#/compare/" + ",".join(quote(name, safe="") for name in names))
        tab.page.wait_for_selector("h2:has-text('The same held-out tasks')")
        tab.page.wait_for_selector(".square" if names == ("lab",) else "text=no task in common")
        assert "not in the exported file" not in tab.page.text_content("main")
    open_page(tab, f"#/lab/rollout/{ROLLOUT}")
    tab.page.wait_for_selector(".transcript")
    assert tab.problems == []


VALUES: dict[str, tuple[object, ...]] = {
    "phase": ("train", "eval_before"), "step": (1, 99), "account": (2,), "group_id": ("train/00002/000", ""),
    "task": ("task-1-0",), "category": ("swap", ""), "status": ("truncated", "ok"),
    "outcome": ("unresolved", "tampered", "none"), "trust": ("strong", "weak"), "state": ("trained",),
    "task_set": ("", "s"), "fate": ("degenerate", "zero_advantage"), "excluded": ("degenerate", "stale"),
    "why": ("# of # cases pass", "case # raised NameError"), "error": ("the agent stopped", ""),
    "solved": (0, 1), "min_reward": (0.5,), "max_reward": (0, 0.5), "dropped": (0, 1), "egress": (0, 1),
    "retried": (0, 1), "malformed": (0, 1), "unknown_tool": (0, 1), "parts_left_out": (0, 1),
    "unparsed": (0, 1), "q": ("nameerror", "TASK-1-0", "%", "_", "train/00001"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("tab", ["lab"], indirect=True)
def test_filters_and_sorts_of_a_file_are_those_of_the_server(tab: Tab, runs: Path) -> None:
    """The file cannot run SQL: static/embedded.js repeats the rules of storage/queries.py."""
    assert set(VALUES) == set(FILTERS)
    asked: list[dict[str, object]] = [{name: value} for name in VALUES for value in VALUES[name]]
    asked += [{"sort": way + key, "phase": "train"} for key in SORTS for way in ("", "-")]
    asked.append({"status": "ok", "solved": 0, "sort": "-agent_s"})
    paths = [f"lab/rollouts?{urlencode(query)}" for query in asked]
    found = tab.page.evaluate(
        "paths => Promise.all(paths.map(path => m_api_js.get(path).then(page => page.rows.map(r => r.id))))",
        paths,
    )
    shown = 0
    with RunReader(runs / "lab") as reader:
        for query, ids in zip(asked, found, strict=True):
            filters = {name: value for name, value in query.items() if name != "sort"}
            page = reader.page(filters, sort=str(query.get("sort", "")), limit=200)
            assert ids == [row["id"] for row in page.rows], query
            shown += bool(ids)
    assert shown > 40


@pytest.mark.parametrize("tab", ["lab"], indirect=True)
def test_overview_rollout_and_tokens_are_shown(tab: Tab) -> None:
    tab.page.wait_for_selector("h2:has-text('Is it learning?')")
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
