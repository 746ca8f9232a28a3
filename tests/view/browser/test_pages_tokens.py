"""The token view on a row that is far too long to be drawn at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_lab import Tab, open_tab, serve
from run_lab import Flavour, make_rollout, make_run

from insitu.storage.run_dir import RunDir
from insitu.types import IntArray, Ledger, Rollout, Segment, Trajectory, Turn

pytestmark = [pytest.mark.browser, pytest.mark.slow]
TOKENS = 200_000
LONG = "long/00099/000/00"
FRAMED = """() => {
  const [at, view] = ['.minimap-at', '.minimap-view'].map(name => document.querySelector(name)?.style);
  const [token, start, width] = [at?.left, view?.left, view?.width].map(parseFloat);
  return token >= start && token <= start + width && width < 2;
}"""
"""Whether the frame of the minimap holds the chosen token and is about as small as what is in view."""


def long_rollout(tokens: int) -> Rollout:
    """Return a rollout of one turn whose reply repeats that of an ordinary one."""
    base = make_rollout(Flavour(), "long", 99, 0, 0, solved=True)
    assert base.trajectory is not None
    first = base.trajectory.turns[2]
    ids: IntArray = np.resize(first.ids, tokens - len(first.context_ids)).astype(np.int32)
    logprobs = (-(np.arange(len(ids), dtype=np.float32) % 97) / 16).astype(np.float32)
    turn = Turn(
        index=0, parent=-1, context_ids=first.context_ids, ids=ids, logprobs=logprobs, finish="stop",
        version_runs=((0, 1),),
    )  # fmt: skip
    fresh = len(first.context_ids)
    mask = np.arange(tokens) >= fresh
    segment = Segment(
        rollout_id=base.id, index=0, kind="sampled", label="final",
        ids=np.concatenate([first.context_ids, ids]), mask=mask,
        logprobs=np.concatenate([np.zeros(fresh, np.float32), logprobs]),
        versions=np.where(mask, 1, 0).astype(np.int32),
    )  # fmt: skip
    ledger = Ledger(captured=len(ids), trained=len(ids))
    trajectory = Trajectory(segments=(segment,), turns=(turn,), ledger=ledger)
    return replace(base, id=LONG, trajectory=trajectory)


def put_long(run: Path, tokens: int) -> Path:
    with RunDir.open(run) as directory, directory.store() as store:
        store.put_rollout("long", 99, 0, 0, long_rollout(tokens))
    return run


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_long(make_run(tmp_path_factory.mktemp("runs") / "long"), TOKENS)


@pytest.fixture
def tab(browser: Any, long_run: Path) -> Iterator[Tab]:
    for served in serve(long_run):
        yield from open_tab(browser, served)


def readout(tab: Tab) -> dict[str, str]:
    names, values = (tab.page.locator(f".tokens-readout {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=False))


def at_token(tab: Tab, token: int) -> dict[str, str]:
    tab.page.wait_for_selector(f".tokens-readout dd:text-is('{token:,}')")
    return readout(tab)


@pytest.mark.full
def test_only_pages_in_view_are_drawn(tab: Tab) -> None:
    tab.open(f"#/long/rollout/{LONG}?tab=tokens")
    tab.page.wait_for_selector(".tokpage")
    for share in (0.25, 0.5, 1.0):
        tab.page.evaluate(f"e = document.querySelector('.tokens'); e.scrollTop = e.scrollHeight * {share}")
        tab.page.wait_for_timeout(300)
        assert 1 <= tab.page.locator(".tokpage").count() <= 5
    tab.page.wait_for_selector(f"text=of {TOKENS:,}")
    assert tab.problems == []


def test_an_address_leads_to_its_token(tab: Tab) -> None:
    for token in (150_000, 3, TOKENS - 1):
        tab.open("#/")
        tab.open(f"#/long/rollout/{LONG}?tab=tokens&signal=logprob&at={token}")
        shown = at_token(tab, token)
        assert shown["turn"] == "0"
        assert "%" in shown.get("log-probability", "%")
        visible = """() => {
          const range = [...CSS.highlights.get('tok-here')][0];
          const box = document.querySelector('.tokens').getBoundingClientRect();
          const live = document.createRange();
          live.setStart(range.startContainer, range.startOffset);
          live.setEnd(range.endContainer, range.endOffset);
          const place = live.getBoundingClientRect();
          return place.top >= box.top - 2 && place.bottom <= box.bottom + 2;
        }"""
        assert tab.page.evaluate(visible), token
        tab.page.wait_for_function(FRAMED)
    assert tab.problems == []


def test_parts_follow_each_other_in_every_width(tab: Tab) -> None:
    """Lines wrap elsewhere after a resize; what is read stays in view."""
    page = tab.page
    tab.open(f"#/long/rollout/{LONG}?tab=tokens&at=100000")
    at_token(tab, 100_000)
    gaps = """() => {
      const boxes = [...document.querySelectorAll('.tokpage')].map(e => e.getBoundingClientRect());
      boxes.sort((a, b) => a.top - b.top);
      return boxes.slice(1).map((box, i) => Math.round(box.top - boxes[i].bottom));
    }"""
    for width in (1280, 500, 900):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(500)
        found = page.evaluate(gaps)
        assert found, width
        assert all(abs(gap) <= 1 for gap in found), (width, found)
        page.wait_for_function(FRAMED)
    assert tab.problems == []


def test_without_a_token_in_the_address_the_first_sampled_one_is_in_view(tab: Tab) -> None:
    tab.open(f"#/long/rollout/{LONG}?tab=tokens")
    tab.page.wait_for_selector(".tokpage")
    tab.page.wait_for_function(
        """() => {
          const range = [...CSS.highlights.values()].flatMap(tone => [...tone])[0];
          if (!range) return false;
          const box = document.querySelector('.tokens').getBoundingClientRect();
          const live = document.createRange();
          live.setStart(range.startContainer, range.startOffset);
          live.setEnd(range.endContainer, range.endOffset);
          const place = live.getClientRects()[0];
          return place.top >= box.top - 2 && place.bottom <= box.bottom + 2;
        }"""
    )
    assert "at=" not in tab.page.evaluate("location.hash")


def test_keys_go_from_token_to_token_and_to_flagged_ones(tab: Tab) -> None:
    tab.open(f"#/long/rollout/{LONG}?tab=tokens&signal=logprob&at=4095")
    at_token(tab, 4095)
    tab.page.keyboard.press("ArrowRight")
    at_token(tab, 4096)
    tab.page.keyboard.press("n")
    tab.page.wait_for_timeout(300)
    found = readout(tab)
    assert float(found["log-probability"].split()[0].replace("\u2212", "-")) < np.log(0.01)
    assert int(found["token"].replace(",", "")) > 4096
    # Line ends are only in the prompt.
    tab.open("#/long")
    tab.page.wait_for_selector("h2")
    tab.open(f"#/long/rollout/{LONG}?tab=tokens&at=0")
    at_token(tab, 0)
    tab.page.keyboard.press("w")
    tab.page.wait_for_selector(".newline")
    assert tab.problems == []


def test_the_legend_filters_and_counts(tab: Tab) -> None:
    tab.open(f"#/long/rollout/{LONG}?tab=tokens&signal=logprob")
    chip = tab.page.locator("[aria-label='Legend: show only'] .chip").first
    chip.wait_for()
    sizes = "() => [...CSS.highlights.values()].map(h => h.size)"
    before = sum(tab.page.evaluate(sizes))
    chip.click()
    tab.page.wait_for_selector("[aria-label='Legend: show only'] .chip[aria-pressed=true]")
    assert 0 < sum(tab.page.evaluate(sizes)) < before
    assert "only=0" in tab.page.evaluate("location.hash")
