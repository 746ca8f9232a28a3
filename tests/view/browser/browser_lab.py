"""Viewers in threads of their own, and browser tabs that note what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu_view.web.serve import Viewer, serving

WAIT_MS = 60_000


@dataclass
class Served:
    """A viewer in a thread of its own."""

    paths: list[Path]
    viewer: Viewer | None = None
    loop: asyncio.AbstractEventLoop | None = None
    stop: asyncio.Event | None = None
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def origin(self) -> str:
        assert self.viewer is not None
        return f"http://127.0.0.1:{self.viewer.port}"

    async def serve(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self.paths, port=0) as self.viewer:
            self.ready.set()
            await self.stop.wait()


def serve(*paths: Path) -> Iterator[Served]:
    served = Served(list(paths))
    thread = threading.Thread(target=lambda: asyncio.run(served.serve()))
    thread.start()
    try:
        assert served.ready.wait(30)
        yield served
    finally:
        if served.loop is not None and served.stop is not None:
            served.loop.call_soon_threadsafe(served.stop.set)
        thread.join(30)
        assert not thread.is_alive()


@dataclass
class Tab:
    """A page of the viewer, and what went wrong on it."""

    page: Any
    origin: str
    problems: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        """Open an address and wait until its data is shown."""
        self.page.goto(f"{self.origin}/{address}")
        self.settled()

    def settled(self) -> None:
        # An event that changed the address is rendered by the next frame.
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        self.page.wait_for_selector("html[data-ready]", state="attached")
        self.page.wait_for_selector(
            "main .loading, main [role=status], main [aria-busy=true]", state="detached"
        )


def open_tab(browser: Any, served: Served, **options: Any) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    tab = Tab(page, served.origin)
    page.on("console", lambda m: m.type in ("error", "warning") and tab.problems.append(f"console: {m.text}"))
    page.on("pageerror", lambda error: tab.problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (tab.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "request",
        lambda r: r.url.startswith((served.origin, "data:")) or tab.problems.append(f"request: {r.url}"),
    )
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', event =>"
        " (window.violations ??= []).push(event.violatedDirective + ' ' + event.sample))"
    )
    assert served.viewer is not None
    page.goto(served.viewer.url)
    yield tab
    context.close()
