"""Every page in a browser: hostile text stays text, addresses round trip, keys reach everything."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from addresses import FOREIGN, HOSTILE, ROLLOUT, addresses, task_of
from browser_lab import Served, Tab, open_tab, serve
from run_lab import make_run
from samples_lab import AFTER, BEFORE, stored

pytestmark = [pytest.mark.browser, pytest.mark.slow]
URL_SAFE = "!'()*~"
"""What encodeURIComponent leaves as it is."""


def test_hostile_text_runs_nothing_on_any_page(tab: Tab, runs: Path) -> None:
    page = tab.page
    for name, address in addresses(HOSTILE, task_of(runs / HOSTILE)).items():
        tab.open(address)
        page.keyboard.press("e")
        page.mouse.move(400, 500)
        foreign = page.evaluate(FOREIGN)
        assert foreign == {"pwned": None, "violations": [], "made": 0, "links": []}, name
    assert tab.problems == []


def test_hostile_text_is_shown_as_text(tab: Tab) -> None:
    tab.open(f"#/%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D1%3E/rollout/{ROLLOUT}")
    shown = tab.page.text_content("main")
    assert "<script>window.pwned=1</script>" in shown
    assert "U+202E" in shown
    assert "\u202e" not in shown
    assert "\x1b" not in shown
    assert tab.page.locator("main .ansi-red").first.text_content() == "red"
    tab.open(f"#/%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D1%3E/rollout/{ROLLOUT}?tab=tokens")
    tab.page.wait_for_selector(".tokpage .ctl")
    assert "\u202e" not in tab.page.text_content(".tokens")


@pytest.mark.parametrize("when", ["DOMContentLoaded", "load", "rendered"])
def test_an_address_that_changes_while_the_viewer_starts_is_followed(
    browser: Any, tmp_path: Path, when: str
) -> None:
    """A link that was followed before the listener was there led nowhere."""
    make_run(tmp_path / "lab")
    change = f"location.hash = '#/lab/rollout/{ROLLOUT}?tab=tokens'"
    script = f"addEventListener('{when}', () => {{ {change} }})"
    if when == "rendered":
        script = (
            "new MutationObserver((_, self) => { if (document.querySelector('main .loading')) {"
            f" self.disconnect(); {change}; }} }}).observe(document, {{ childList: true, subtree: true }})"
        )
    for served in serve(tmp_path / "lab"):
        for tab in open_tab(browser, served):
            tab.page.add_init_script(script)
            tab.page.goto(f"{served.origin}/")
            tab.page.wait_for_selector(".tokpage", timeout=15_000)
            assert tab.problems == []


def test_every_page_has_one_title_and_fits_a_narrow_window(tab: Tab, runs: Path) -> None:
    tab.page.set_viewport_size({"width": 320, "height": 640})
    for name, address in addresses("lab", task_of(runs / "lab")).items():
        tab.open(address)
        assert tab.page.locator("h1").count() == 1, name
        wide = tab.page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, f"{name} is {wide} px too wide"
    tab.open(f"#/compare/lab,{quote(HOSTILE, safe='')}")
    tab.page.wait_for_selector("h2:has-text('The same held-out tasks')")
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 320
    assert tab.problems == []


def test_tasks_with_several_rollouts_are_compared_by_their_rates(browser: Any, tmp_path: Path) -> None:
    stored(tmp_path / "several", BEFORE, AFTER)
    for served in serve(tmp_path):
        for tab in open_tab(browser, served):
            tab.open("#/compare/several")
            tab.page.wait_for_selector(".square")
            shown = " ".join(tab.page.locator(".quad").all_text_contents())
            assert shown == "1better on B17 % 0better on A0 % 5equally often solved83 %"
            assert tab.page.locator(".quad[aria-pressed=true]").text_content().startswith("1better on B")
            text = tab.page.locator("p:has-text('Change')").text_content()
            assert text.startswith("Change +5.6 percentage points (95 % ")
            assert "over 6 tasks; sign-flip test: p = 1" in text
            assert "0 % → 33 %" in tab.page.locator(".paired").text_content()
            assert tab.problems == []


def test_addresses_round_trip(tab: Tab, runs: Path) -> None:
    """What a person has chosen is in the address, and the address alone brings it back."""
    page = tab.page
    tab.open("#/lab/rollouts")
    page.get_by_role("button", name="unresolved").click()
    page.get_by_role("button", name="Time").click()
    page.wait_for_selector("th[aria-sort=descending]:has-text('Time')")
    tab.settled()
    address = page.evaluate("location.hash")
    assert "outcome=unresolved" in address
    assert "sort=-total_s" in address
    rows = page.locator(".window tbody tr td.id").all_text_contents()
    tab.open("#/")
    tab.open(address)
    assert page.locator(".window tbody tr td.id").all_text_contents() == rows
    tab.open(f"#/lab/rollout/{ROLLOUT}?tab=tokens&signal=logprob&at=7")
    page.wait_for_selector(".tokens-readout dt")
    assert page.locator(".tokens-readout dd").first.text_content() == "7"
    assert page.locator(".chip[aria-pressed=true]", has_text="Log-probability").count() == 1
    for name, link in addresses("lab", task_of(runs / "lab")).items():
        tab.open(link)
        assert page.locator("main .notice.bad[role=alert]").count() == 0, name
    assert tab.problems == []


def test_the_keyboard_alone_leads_from_the_runs_to_a_token(tab: Tab) -> None:
    page = tab.page
    tab.open("#/")
    # The keys of a page work after its first paint, a moment after its rows are there.
    for _ in range(20):
        page.keyboard.press("j")
        page.wait_for_timeout(100)
        if page.query_selector(".runs tr.here"):
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("h2:has-text('Is it learning?')")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_selector(".window tbody tr td.id a")
    for _ in range(20):
        page.keyboard.press("j")
        page.wait_for_timeout(100)
        if page.query_selector(".window tr.here"):
            break
    for key in ("j", "k", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".transcript .turn")
    page.keyboard.press("k")
    page.wait_for_selector(".transcript .turn.here")
    page.keyboard.press("i")
    page.wait_for_selector(".tokpage")
    page.keyboard.press("n")
    page.wait_for_selector(".tokens-readout dt")
    assert "at=" in page.evaluate("location.hash")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    page.wait_for_selector("h1:has-text('Rollouts')")
    assert tab.problems == []


def test_y_copies_the_command_that_opens_this_place(browser: Any, served: Served, runs: Path) -> None:
    for name, query in (("lab", "tab=tokens&at=7"), (HOSTILE, "tab=verdict")):
        for tab in open_tab(browser, served, permissions=["clipboard-read", "clipboard-write"]):
            place = f"{quote(name, safe=URL_SAFE)}/rollout/{ROLLOUT}?{query}"
            tab.open(f"#/{place}")
            tab.page.bring_to_front()  # only a page with the focus may write to the clipboard
            tab.page.keyboard.press("y")
            tab.page.wait_for_selector("text=copied: the command that opens this view")
            copied = tab.page.evaluate("navigator.clipboard.readText()")
            assert shlex.split(copied) == ["insitu", "view", str(runs / name), "--at", place]


@pytest.mark.full
def test_a_place_of_the_command_line_is_the_first_page(tab: Tab, runs: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "insitu",
        "view",
        str(runs / "lab"),
        "--no-open",
        "--json",
        "--port",
        "0",
    ]
    with subprocess.Popen([*command, "--at", "#/lab/health"], stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        try:
            tab.page.goto(json.loads(viewer.stdout.readline())["url"])
            tab.page.wait_for_selector("h1:has-text('Health')")
        finally:
            viewer.terminate()


def test_each_chart_is_also_a_table(tab: Tab) -> None:
    """Opened with the keyboard, with one row per point."""
    tab.open("#/lab")
    charts = tab.page.locator("figure.chart")
    tables = tab.page.locator("figure.chart > details.as-table > summary")
    assert tables.count() == charts.count() > 2
    tables.first.focus()
    tab.page.keyboard.press("Enter")
    rows = tab.page.locator("figure.chart").first.locator("tbody tr")
    rows.first.wait_for()
    shown = {row.split("%")[0][:2].strip() for row in rows.all_text_contents()}
    assert {"1", "2", "3"} <= {text[:1] for text in shown}
    assert "training tasks" in tab.page.locator("figure.chart").first.locator("thead").text_content()
    assert tab.problems == []


def test_speed_is_shown_where_it_was_measured(tab: Tab, browser: Any, tmp_path: Path) -> None:
    tab.open("#/lab")
    shown = [chart.get_attribute("aria-label") for chart in tab.page.locator(".small [role=img]").all()]
    assert "tokens sampled per second: 3 points, from 100 to 300" in shown
    assert "tokens trained per second: 3 points, from 50 to 150" in shown
    assert "share of the GPUs' peak (MFU): 3 points, from 0.1 to 0.3" in shown
    assert "unparsed share: 3 points, from 0.143 to 0.429" in shown
    assert tab.page.locator(".small:has-text('MFU') b").text_content() == "30 %"
    tab.open("#/lab/health")
    gpus = tab.page.locator(".small-multiples > div:has-text('use of the GPUs')")
    assert gpus.locator(".legend li").all_text_contents() == ["GPU 0", "GPU 1"]
    assert "memory of the GPUs" in tab.page.text_content("main")
    assert tab.problems == []
    stored(tmp_path / "bare", BEFORE, AFTER)
    for served in serve(tmp_path / "bare"):
        for bare in open_tab(browser, served):
            for address in ("#/bare", "#/bare/health"):
                bare.open(address)
                text = bare.page.text_content("main")
                assert not any(word in text for word in ("MFU", "per second", "GPU"))


def test_j_k_and_enter_open_rows_where_a_page_has_no_keys_of_its_own(tab: Tab) -> None:
    for address, opened in (("#/lab", "#/lab/rollout"), ("#/lab/tasks", "#/lab/task/")):
        tab.open(address)
        tab.page.wait_for_selector("main .bar-row, main tbody tr a")
        for key in ("j", "j", "k"):
            tab.page.keyboard.press(key)
        first = tab.page.evaluate("document.activeElement.getAttribute('href')")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_function("href => location.hash === href", arg=first)
        assert first.startswith(opened)
    tab.open("#/lab/tasks?show=changed")
    tab.page.get_by_role("button", name="Held-out tasks").click()
    tab.page.wait_for_selector("main tbody tr")
    assert tab.page.locator("main tbody tr").count() == 3
    tab.open("#/lab/step/2")
    assert tab.page.locator("main .title a").all_text_contents() == ["← step 1", "step 3 →"]
    assert "The trainer says: a row that no rank holds was computed by 2" in tab.page.text_content("main")
    tab.open("#/lab/step/3")
    assert tab.page.locator("main .title a").all_text_contents() == ["← step 2"]
    tab.open("#/lab/step/abc")
    assert "There is no step abc" in tab.page.text_content("main")


def test_tokens_of_a_degenerate_group_are_not_called_trained(tab: Tab, runs: Path) -> None:
    with closing(sqlite3.connect(runs / "lab" / "run.sqlite")) as db:
        degenerate = "SELECT rollout_id FROM states WHERE reason = 'degenerate' ORDER BY 1"
        name = db.execute(degenerate).fetchone()[0]
    for rollout, trained in ((name, False), (ROLLOUT, True)):
        tab.open(f"#/lab/rollout/{rollout}")
        shown = tab.page.locator(".stats .stat:has-text('Tokens trained') .value").text_content()
        assert (not shown.startswith("0 of")) == trained, shown
    assert tab.problems == []


def test_the_overview_leads_to_the_same_tasks_before_and_after(tab: Tab) -> None:
    tab.open("#/lab")
    tab.page.get_by_role("link", name="task by task").click()
    tab.page.wait_for_selector("h2:has-text('The same held-out tasks')")
    tab.page.get_by_role("link", name="side by side").first.click()
    tab.page.wait_for_selector("h1:has-text('Two rollouts')")
    assert tab.problems == []


@pytest.fixture
def mixed(browser: Any, tmp_path: Path) -> Iterator[Tab]:
    """A run of two task sets."""
    run = make_run(tmp_path / "mixed", agents={"tools": "script", "single": "single_turn"})
    for served in serve(run):
        yield from open_tab(browser, served)


def test_rollouts_of_a_mix_are_filtered_by_task_set(mixed: Tab, tab: Tab) -> None:
    mixed.open("#/mixed/rollouts?phase=eval_after")
    page = mixed.page
    page.click(".facet:has(.label:text-is('task set')) .chip:has-text('single')")
    mixed.settled()
    assert "task_set=single" in page.url
    rows = page.locator("table.data tbody tr")
    assert rows.count() == 2
    assert {row.split("\t")[1] for row in rows.all_inner_texts()} == {"single"}
    for address in ("rollout/train/00001/001/00", "group/train/1/1", "step/1", "tasks", "task/task-1-0"):
        mixed.open(f"#/mixed/{address}")
        assert "task set" in page.inner_text("main").lower(), address
        assert "single" in page.inner_text("main"), address
    assert mixed.problems == []
    for address in ("rollouts", f"rollout/{ROLLOUT}", "tasks"):
        tab.open(f"#/lab/{address}")
        assert "task set" not in tab.page.inner_text("main").lower()


def test_a_search_of_what_is_not_there_says_so(tab: Tab) -> None:
    tab.open("#/lab/rollouts?q=nothing-is-called-this")
    assert "No rollout passes these filters." in tab.page.text_content("main")
    tab.open("#/no-such-run")
    tab.page.wait_for_selector("text=No run is called")
    tab.open("#/lab/no-such-page")
    tab.page.wait_for_selector("text=There is no page at this address")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_scheme_follows_the_system_and_the_switch(browser: Any, served: Any, scheme: str) -> None:
    for tab in open_tab(browser, served, color_scheme=scheme):
        tab.open("#/lab")
        luminance = (
            "() => getComputedStyle(document.documentElement).backgroundColor"
            ".match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)"
        )
        before = tab.page.evaluate(luminance)
        assert (before < 200) == (scheme == "dark")
        tab.page.get_by_role("button", name="Switch between dark and light").click()
        assert (tab.page.evaluate(luminance) < 200) != (scheme == "dark")
