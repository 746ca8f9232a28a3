"""A real `insitu serve` directory in the viewer while it serves: every page opens."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from addresses import TABS
from browser_lab import open_tab, serve

import insitu

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SMALL = {"limits.max_call_tokens": 8, "model.max_context_tokens": 1024}
PAGES = (
    "",
    "/rollouts",
    "/group/serve/0/0",
    "/tasks?phase=serve",
    "/task/greet",
    "/health",
    "/cheats",
    "/config",
)


def ask(session: insitu.ServedSession) -> None:
    body = {"model": session.model, "messages": [{"role": "user", "content": "Hello <b>you</b>."}]}
    request = urllib.request.Request(
        f"{session.openai_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {session.key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, insitu.Server]]:
    """A server with two sealed sessions of one task, and one that is open."""
    path = tmp_path_factory.mktemp("runs") / "served"
    with insitu.serve(overrides=SMALL, run={"dir": str(path)}) as server:
        for name, reward in (("first", 1.0), ("second", 0.0)):
            session = server.session(name, task="greet")
            ask(session)
            session.seal(reward=reward)
        ask(server.session("open", task="greet"))
        yield path, server


def look(browser: Any, path: Path) -> dict[str, str]:
    """Open every page; return their text by address."""
    texts = {}
    for served in serve(path):
        for tab in open_tab(browser, served):
            for page in (*PAGES, *(f"/rollout/first?tab={name}" for name in TABS)):
                tab.open(f"#/{path.name}{page}")
                if page.endswith("tab=tokens"):
                    tab.page.wait_for_selector("main :text('Hello')")  # tokens are loaded after the page
                texts[page] = tab.page.text_content("main")
                assert tab.page.locator("h1").count() == 1, page
            texts["head"] = tab.page.text_content("header")
            assert tab.problems == []
    return texts


@pytest.mark.full
def test_sessions_open_in_every_page(browser: Any, serving: tuple[Path, insitu.Server]) -> None:
    path, _ = serving
    texts = look(browser, path)
    assert "running" in texts["head"]
    assert "served sessions" in texts[""], "no agent of insitu's ran"
    assert "first" in texts["/rollouts"]
    assert "second" in texts["/rollouts"]
    assert "greet" in texts["/tasks?phase=serve"]
    assert "first" in texts["/task/greet"]
    assert "Hello <b>you</b>." in texts["/rollout/first?tab=transcript"]
    assert "Hello" in texts["/rollout/first?tab=tokens"]
