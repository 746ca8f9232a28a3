"""One browser per file, a context per test; runs of the real store, served by the real server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_lab import Served, Tab, open_tab, serve
from run_lab import make_run

ARGUMENTS = [
    "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. Playwright keeps an event loop running, so tests of other files must not meet it."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        pytest.skip("no Chromium here: scripts/setup test installs it as root")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: scripts/setup test"
    )
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with equal content but for their text: `lab` is harmless, the other hostile."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "lab")
    make_run(folder / "<img src=x onerror=window.pwned=1>", hostile=True)
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    yield from serve(runs)


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Tab]:
    yield from open_tab(browser, served)
