"""Pictures of a rollout, of a step and of all tasks: they agree with the store and lead to what they show."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from addresses import ROLLOUT
from browser_lab import Tab, open_tab, serve
from run_lab import Flavour, make_rollout, make_run

from insitu.storage.store import Store
from insitu.types import Ledger

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def width_of(part: Any) -> float:
    """Return the width of a part of a bar in percent of its axis."""
    return float(part.evaluate("part => part.style.width").rstrip("%"))


def test_a_rollout_is_a_lane_per_segment_by_tokens_and_by_time(tab: Tab, runs: Path) -> None:
    page = tab.page
    tab.open(f"#/lab/rollout/{ROLLOUT}")
    lanes = page.locator(".picture .strip-row")
    names = [name.split("·")[0].strip() for name in lanes.locator(".strip-name").all_text_contents()]
    assert names == ["main line", "wiped later", "sub-agent"]
    with closing(sqlite3.connect(runs / "lab" / "run.sqlite")) as db:
        stored = db.execute(
            "SELECT label, length(mask), length(logprobs) / 4 FROM segments WHERE rollout_id = ?", (ROLLOUT,)
        )
        tokens = {label: (whole, trained) for label, whole, trained in stored}
    most = max(whole for whole, _ in tokens.values())
    for lane, label in zip(lanes.all(), ("final", "wipe", "subagent"), strict=True):
        parts = lane.locator("a").all()
        whole = sum(map(width_of, parts))
        solid = sum(map(width_of, lane.locator("a[class='strip-part sampled']").all()))
        assert whole == pytest.approx(100 * tokens[label][0] / most, abs=0.5)
        assert solid == pytest.approx(100 * tokens[label][1] / most, abs=0.5)
    shared = lanes.first.locator("a").nth(1)
    assert "hatched" in (shared.get_attribute("class") or "")
    assert (shared.get_attribute("aria-label") or "").endswith("trained in another lane")
    page.get_by_role("button", name="by time").click()
    parts = page.locator(".picture .strip-row").nth(1).locator("a.sampled").all()
    assert width_of(parts[0]) == pytest.approx(100 * 0.25 / 3.5, abs=0.1)
    page.get_by_role("button", name="by tokens").click()
    assert tab.problems == []


def test_the_picture_leads_to_its_turns_and_the_keyboard_walks_it(tab: Tab) -> None:
    page = tab.page
    tab.open(f"#/lab/rollout/{ROLLOUT}?tab=verdict")
    page.locator(".picture a[href*='turn=3']").last.click()
    page.wait_for_selector("#turn-3.here")
    page.locator(".picture a[href*='turn=2']").last.click()
    page.wait_for_selector("#turn-2.here")
    page.locator(".picture a").first.focus()
    for key, turn in (("ArrowRight", 0), ("ArrowRight", 2), ("ArrowDown", 1), ("ArrowDown", 3)):
        page.keyboard.press(key)
        at = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert at.startswith(f"turn {turn}"), key
    page.keyboard.press("Enter")
    page.wait_for_selector("#turn-3.here")
    page.locator(".picture details.as-table > summary").click()
    page.locator(".picture tbody tr").nth(4).wait_for()
    assert page.locator(".picture tbody tr").count() == 5
    assert tab.problems == []


def test_a_task_of_several_steps_has_a_numbered_main_line_for_each(browser: Any, tmp_path: Path) -> None:
    made = make_rollout(Flavour(), "train", 9, 0, 0, solved=False)
    labels = {"wipe": "final"}
    several = [replace(one, label=labels.get(one.label, one.label)) for one in made.trajectory.segments]
    rollout = replace(made, trajectory=replace(made.trajectory, segments=tuple(several)))
    run = make_run(tmp_path / "several", steps=1)
    with Store(run / "run.sqlite") as store:
        store.put_rollout("train", 9, 0, 0, rollout)
    for served in serve(run):
        for tab in open_tab(browser, served):
            tab.open("#/several/rollout/train/00009/000/00")
            tab.page.wait_for_selector(".transcript h3")
            assert tab.page.locator(".transcript h3").all_text_contents() == ["Step 1", "Step 2"]
            names = tab.page.locator(".picture .strip-name").all_text_contents()
            assert [name.split("·")[0].strip() for name in names] == ["step 1", "step 2", "sub-agent"]
            assert tab.problems == []


def test_replies_that_the_agent_asked_for_again_are_marked(browser: Any, tmp_path: Path) -> None:
    made = make_rollout(Flavour(), "train", 9, 0, 0, solved=False)
    lost = replace(made.trajectory.turns[2], index=4, excluded="retry_sibling")
    captured = made.trajectory.ledger.captured + len(lost.ids)
    ledger = Ledger(
        captured=captured, trained=captured - len(lost.ids), excluded={"retry_sibling": len(lost.ids)}
    )
    trajectory = replace(made.trajectory, turns=(*made.trajectory.turns, lost), ledger=ledger)
    run = make_run(tmp_path / "again", steps=1)
    with Store(run / "run.sqlite") as store:
        store.put_rollout("train", 9, 0, 0, replace(made, trajectory=trajectory))
    for served in serve(run):
        for tab in open_tab(browser, served):
            tab.open("#/again/rollout/train/00009/000/00")
            lanes = tab.page.locator(".picture .strip-row")
            assert lanes.first.locator("[data-mark]").get_attribute("data-mark") == "↻1"
            said = lanes.last.locator("a.hatched").get_attribute("aria-label")
            assert (said or "").startswith("turn 4:")
            assert (said or "").endswith("not trained: retry sibling")
            assert tab.problems == []


def test_a_step_is_a_bar_per_rollout_with_what_became_of_its_tokens(tab: Tab, runs: Path) -> None:
    page = tab.page
    tab.open("#/lab/step/1")
    bars = page.locator(".batch .strip-row")
    assert bars.count() == 16
    with closing(sqlite3.connect(runs / "lab" / "run.sqlite")) as db:
        states = dict(db.execute("SELECT rollout_id, reason FROM states WHERE account = 1"))
    assert set(states.values()) == {"", "degenerate"}
    for bar in bars.all():
        name = (bar.locator("a").get_attribute("aria-label") or "").split(":")[0]
        assert bar.locator(".sampled:not(.hatched)").count() == (not states[name])
        assert bar.locator(".hatched").count() == bool(states[name])
        place = "/".join(str(int(number)) for number in name.split("/")[1:])
        assert bar.locator(".strip-name").text_content() == place
    labels = [bar.locator("a").get_attribute("aria-label") or "" for bar in bars.all()]
    assert [label[:15] for label in labels] == sorted(label[:15] for label in labels)
    page.get_by_role("button", name="longest first").click()
    tab.settled()
    assert "bars=tokens" in page.url
    whole = [sum(map(width_of, bar.locator(".strip-part").all())) for bar in bars.all()]
    assert whole == sorted(whole, reverse=True)
    assert whole[0] == pytest.approx(100, abs=0.1)
    page.locator(".batch details.as-table > summary").click()
    page.locator(".batch tbody tr").nth(15).wait_for()
    assert page.locator(".batch tbody tr").count() == 16
    page.locator(".batch .strip-row a").first.focus()
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.getAttribute('href')")
    page.keyboard.press("Enter")
    page.wait_for_function("href => location.hash === href", arg=second)
    assert tab.problems == []


def make_grid(run: Path) -> None:
    """Write a run in which `a` is solved more and more, `b` is never graded, `c` always and `d` in step 1."""
    make_run(run, steps=1)
    rewards = {"a": (0.0, 0.5, 1.0), "b": (None, None, None), "c": (1.0, None, 1.0), "d": (1.0, 0.0, 0.0)}
    with Store(run / "run.sqlite") as store:
        for number, (task, of_steps) in enumerate(rewards.items()):
            for step, reward in enumerate(of_steps, 2):
                for slot in range(2):
                    solved = None if reward is None else float(slot < 2 * reward)
                    made = make_rollout(Flavour(), "train", step, number, slot, solved=bool(solved))
                    store.put_rollout("train", step, number, slot, replace(made, task_id=task, reward=solved))


def test_tasks_by_steps_are_sorted_and_lead_to_their_groups(browser: Any, tmp_path: Path) -> None:
    make_grid(tmp_path / "grid")
    for served in serve(tmp_path / "grid"):
        for tab in open_tab(browser, served):
            page = tab.page
            tab.open("#/grid/tasks")
            page.get_by_role("button", name="grid of steps").click()
            tab.settled()
            rows = page.locator(".grid-row")
            names = rows.locator(".grid-name").all_text_contents()
            assert names == ["a", "b", "c", "d", "task-1-0", "task-1-1", "task-1-2", "task-1-3"]
            said = [cell.get_attribute("aria-label") for cell in rows.first.locator(".grid-cell").all()]
            assert said == ["step 2: 0 of 2 solved", "step 3: 1 of 2 solved", "step 4: 2 of 2 solved"]
            colours = [
                cell.evaluate("cell => getComputedStyle(cell).backgroundColor")
                for cell in rows.first.locator(".grid-cell").all()
            ]
            assert len(set(colours)) == 3
            assert rows.nth(1).locator(".grid-cell.hatched").count() == 3
            for order, first in (("solve rate", ["c", "a", "task-1-0"]), ("last change", ["a", "d", "b"])):
                page.get_by_role("button", name=order).click()
                tab.settled()
                assert rows.locator(".grid-name").all_text_contents()[:3] == first
            assert "order=change" in page.url
            rows.first.locator(".grid-name").focus()
            for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
                page.keyboard.press(key)
            page.wait_for_selector("h1:has-text('Group 3')")
            assert page.evaluate("location.hash") == "#/grid/group/train/3/3"
            assert tab.problems == []


def test_a_grid_of_many_tasks_draws_those_in_view(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "many", steps=1)
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        db.execute(
            "CREATE TEMP TABLE n AS WITH RECURSIVE c(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM c"
            " WHERE i < 700) SELECT i FROM c"
        )
        columns = [row[1] for row in db.execute("PRAGMA table_info(rollouts)")]
        changed = {
            "rollout_id": "'train/00002/' || i || '/00'",
            "task_id": "'many-' || i",
            "phase": "'train'",
            "step": "2",
            "group_no": "i",
            "ulid": "printf('%026d', i)",
        }
        chosen = ", ".join(changed.get(name, name) for name in columns)
        db.execute(f"INSERT INTO rollouts SELECT {chosen} FROM n, (SELECT * FROM rollouts LIMIT 1)")
        db.commit()
    for served in serve(run):
        for tab in open_tab(browser, served):
            page = tab.page
            tab.open("#/many/tasks?view=grid&phase=train")
            assert 20 < page.locator(".grid-row").count() < 120
            page.locator(".window.grid").evaluate("box => box.scrollTo(0, box.scrollHeight)")
            page.wait_for_selector(".grid-name:has-text('task-1-3')")
            assert page.locator(".grid-row").count() < 120
            assert tab.problems == []
