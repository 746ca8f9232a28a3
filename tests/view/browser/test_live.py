"""A viewer beside a run that is being written."""

from __future__ import annotations

import os
import subprocess
import sys
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


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from run_lab import Flavour, make_rollout
from insitu.storage.run_dir import RunDir
with RunDir.open(Path(sys.argv[2])) as run, run.store() as store:
    for number in range(600):
        store.put_rollout("late", 99, number, 0, make_rollout(Flavour(), "late", 99, number, 0, True))
        print(number, flush=True)
        time.sleep(0.2)
"""


def test_a_killed_writer_leaves_the_page_and_its_state_is_shown(live: Tab, live_run: Path) -> None:
    (live_run / "summary.json").unlink()
    arguments = [sys.executable, "-c", WRITER, str(Path(__file__).parent.parent / "web"), str(live_run)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "0\n"
            live.open("#/live/rollouts")
            live.page.wait_for_selector("header .badge:has-text('running')")
            live.page.wait_for_selector(".window td.id a:has-text('late/00099/002/00')")
        finally:
            writer.kill()
    live.page.wait_for_selector("header .badge:has-text('stopped')")
    live.page.wait_for_selector(".window td.id a:has-text('late/00099/002/00')")
    live.open("#/live")
    live.page.wait_for_selector("h2:has-text('Is it learning?')")
    assert live.problems == []


@pytest.fixture
def readonly_run(tmp_path: Path) -> Iterator[Path]:
    """A copy of a run that no one may write: by mode, and as root by a read-only bind mount."""
    run = make_run(tmp_path / "frozen")
    if os.geteuid() == 0:
        done = subprocess.run(["mount", "--bind", run, run], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("no bind mounts here, and modes do not stop root")
        subprocess.run(["mount", "-o", "remount,ro,bind", run], check=True)
    for path in (run, *run.rglob("*")) if os.geteuid() else ():
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        yield run
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", run], check=True)
        for path in (run, *run.rglob("*")) if os.geteuid() else ():
            path.chmod(0o755)


def test_a_directory_that_cannot_be_written_is_shown(browser: Any, readonly_run: Path) -> None:
    with pytest.raises(OSError, match="denied|Read-only"):
        (readonly_run / "new").touch()
    for served in serve(readonly_run):
        for tab in open_tab(browser, served):
            for page, title in (("", "Is it learning?"), ("/health", "Health"), ("/rollouts", "Rollouts")):
                tab.open(f"#/frozen{page}")
                tab.page.wait_for_selector(f":is(h1, h2):has-text('{title}')")
            tab.open("#/frozen/rollout/train/00001/000/00?tab=tokens")
            tab.page.wait_for_selector(".tokpage")
            assert tab.problems == []


def test_a_restarted_viewer_says_what_to_do(browser: Any, runs: Path, served: Served) -> None:
    for tab in open_tab(browser, served):
        tab.page.context.clear_cookies()
        tab.page.evaluate("location.hash = '#/lab/health'")
        tab.page.wait_for_selector("text=open the address that")
