"""A tab of the viewer in a browser, for `benchmarks view`: its main thread, the server beside a writer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WAIT_MS = 60_000
PAGE, PART, TOKENS = 4096, 512, 20_480
"""Tokens of one page of the strip and of one element, and those that are scrolled through."""


@contextlib.contextmanager
def server(run: Path) -> Iterator[tuple[str, int]]:
    """Yield address and process id of a viewer's server."""
    command = [sys.executable, "-m", "insitu", "view", str(run), "--no-open", "--json", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101
            yield json.loads(process.stdout.readline())["url"], process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def browser() -> Iterator[Any | None]:
    """Yield Chromium, or None where it or playwright is missing."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program)
        yield found
        found.close()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def settle(pid: int) -> None:
    """Wait until a process has used no CPU for 3 s: what was asked before is answered. At most 60 s."""
    deadline, quiet_since, last = time.monotonic() + 60, time.monotonic(), cpu_of(pid)
    while time.monotonic() < min(deadline, quiet_since + 3):
        time.sleep(0.2)
        if cpu_of(pid) > last + 0.01:
            quiet_since, last = time.monotonic(), cpu_of(pid)


def main_thread_ms(chromium: Any, url: str, run: str, rollout: str) -> dict[str, float]:
    """Return the main thread's CPU milliseconds to open a row and page through it, and to read it.

    Both load 20,480 tokens. Reading scrolls by windows, so that each token is drawn.
    """
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.evaluate(f"location.hash = '#/{run}/rollout/{rollout}'")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(2000)
    devtools = context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        listed = devtools.send("Performance.getMetrics")["metrics"]
        found = {m["name"]: m["value"] for m in listed}
        # Less the time of these questions and of scrolling by script.
        return float(found["TaskDuration"] - found["DevToolsCommandDuration"])

    before = spent()
    # The middle of its sampled half: prompt tokens have no log-probability to colour by.
    page.evaluate(f"location.hash = '#/{run}/rollout/{rollout}?tab=tokens&signal=logprob&at=750000'")
    page.wait_for_selector(".tokpage")
    for _ in range(TOKENS // PAGE - 1):  # the first page is there
        page.wait_for_timeout(1500)
        page.evaluate(
            "e = document.querySelector('.tokens'),"
            f" e.scrollTop += {PAGE // PART} * document.querySelector('.tokpage').offsetHeight"
        )
    page.wait_for_timeout(1500)
    paged, start, seen = spent(), _last_token(page), 0
    while seen < TOKENS:
        page.evaluate("e = document.querySelector('.tokens'), e.scrollTop += 0.9 * e.clientHeight")
        page.wait_for_timeout(400)
        seen = _last_token(page) - start
    read = spent()
    context.close()
    return {"tokens_main_thread_ms": 1000 * (paged - before), "tokens_read_ms": 1000 * (read - paged)}


def _last_token(page: Any) -> int:
    """Return the number of the last token in view, from the line below the strip."""
    (shown,) = re.findall(r"to ([\d\s,.]+) of", page.inner_text(".chips .note"))
    return int(re.sub(r"\D", "", shown))


def beside_a_writer(
    chromium: Any, url: str, pid: int, run: str, commit: Callable[[], None], seconds: int
) -> dict[str, float]:
    """Return the server's share of a core with and without a tab, and the latency of commits in each case.

    One commit per second. A quarter of the time without a tab, half with one on the overview,
    and a quarter after it was closed.
    """
    wall: dict[bool, list[float]] = {False: [], True: []}
    used = {False: 0.0, True: 0.0}

    def write(viewed: bool, commits: int) -> None:
        settle(pid)
        cpu, began = cpu_of(pid), time.monotonic()
        for number in range(commits):
            start = time.perf_counter()
            commit()
            wall[viewed].append(time.perf_counter() - start)
            time.sleep(max(0.0, began + number + 1 - time.monotonic()))
        used[viewed] += cpu_of(pid) - cpu

    write(False, max(1, seconds // 4))
    page = chromium.new_page()
    page.goto(url)
    page.evaluate(f"location.hash = '#/{run}'")
    page.wait_for_selector("h2", timeout=WAIT_MS)
    write(True, max(1, seconds // 2))
    page.close()
    write(False, max(1, seconds // 4))
    return {
        "live_core_share": used[True] / len(wall[True]),
        "idle_core_share": used[False] / len(wall[False]),
        "commit_ms": 1000 * statistics.median(wall[False]),
        "commit_viewed_ms": 1000 * statistics.median(wall[True]),
    }
