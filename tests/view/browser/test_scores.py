"""The trainer's scores of tokens in the token view, of a run that was really trained by the script agent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser_lab import Served, Tab, open_tab, serve
from transformers import Qwen3ForCausalLM

from insitu.config import WARM_START
from insitu.storage.run_dir import read_config, read_store

pytestmark = [pytest.mark.browser, pytest.mark.slow]
OVERRIDES = (
    "run.steps=1", "eval.count=0", "collect.groups_per_step=3", "collect.group_size=4",
    "harness.workers=4", "train.threads=1", "train.min_groups=1",
)  # fmt: skip
LEGEND = "[aria-label='Legend: show only'] .chip"


@dataclass(frozen=True)
class Expected:
    """A trained token, and its scores by another implementation of the model."""

    rollout: str
    segment: int
    token: int
    logp: float
    entropy: float
    sampled: float
    trained: int
    """Trained tokens of its segment."""


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "scored"
    command = [sys.executable, "-m", "insitu", "demo", "--agent", "script", "--plain", f"run.dir={path}"]
    done = subprocess.run([*command, *OVERRIDES], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.fixture(scope="module")
def expected(trained_run: Path) -> Expected:
    """The trained token of highest entropy in a rollout that step 1 trained, computed by transformers."""
    temperature = read_config(trained_run).engine.temperature
    with read_store(trained_run) as store:
        states = {r.id: store.state(r.id) for r in store.step_rollouts(1)}
        rollout = store.rollout(next(name for name, s in states.items() if s and s.state == "trained"))
    row = next(s for s in rollout.trajectory.segments if s.mask.any())
    model = Qwen3ForCausalLM.from_pretrained(WARM_START, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0] / temperature
    at = np.flatnonzero(row.mask)
    log = torch.log_softmax(logits, -1)[at - 1]
    entropy = -(log.exp() * log).sum(-1).numpy()
    chosen = int(entropy.argmax())
    token = int(at[chosen])
    return Expected(
        rollout=rollout.id, segment=row.index, token=token, logp=float(log[chosen, int(row.ids[token])]),
        entropy=float(entropy[chosen]), sampled=float(row.logprobs[token]), trained=len(at),
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(trained_run: Path, runs: Path) -> Iterator[Served]:
    yield from serve(trained_run, runs / "lab")


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Tab]:
    yield from open_tab(browser, served)


def readout(tab: Tab) -> dict[str, str]:
    names, values = (tab.page.locator(f".tokens-readout {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=False))


def number(text: str) -> float:
    return float(text.split()[0].replace("\u2212", "-").replace(",", ""))


@pytest.mark.full
def test_the_readout_has_the_numbers_of_another_implementation(tab: Tab, expected: Expected) -> None:
    e = expected
    tab.open(f"#/scored/rollout/{e.rollout}?tab=tokens&seg={e.segment}&signal=entropy&at={e.token}")
    tab.page.wait_for_selector(f".tokens-readout dd:text-is('{e.token:,}')")
    shown = readout(tab)
    assert number(shown["entropy"]) == pytest.approx(e.entropy, rel=5e-3)
    assert number(shown["trainer"]) == pytest.approx(e.logp, abs=1e-3, rel=5e-3)
    assert abs(number(shown["gap"])) < 1e-4  # the limit of the embedded engine
    assert number(shown["ratio"]) == pytest.approx(np.exp(e.logp - e.sampled), abs=1e-2)
    assert tab.problems == []


@pytest.mark.parametrize("signal", ["gap", "clipped", "entropy"])
def test_a_signal_colours_counts_and_filters(tab: Tab, expected: Expected, signal: str) -> None:
    e = expected
    tab.open(f"#/scored/rollout/{e.rollout}?tab=tokens&seg={e.segment}&signal={signal}")
    tab.page.locator(LEGEND).first.wait_for()
    counts = [number(text) for text in tab.page.locator(f"{LEGEND} .n").all_text_contents()]
    assert sum(counts) == e.trained
    sizes = "() => [...CSS.highlights.values()].reduce((sum, h) => sum + h.size, 0)"
    before = tab.page.evaluate(sizes)
    assert before > 0
    tab.page.locator(LEGEND).first.click()
    tab.page.wait_for_selector(f"{LEGEND}[aria-pressed=true]")
    assert 0 < tab.page.evaluate(sizes) <= before
    tab.page.wait_for_selector(".minimap .legend >> text=largest gap")
    assert tab.page.locator("button.chip:disabled").count() == 0
    assert tab.problems == []


def test_a_run_without_scores_says_why(tab: Tab) -> None:
    tab.open("#/lab/rollout/train/00001/000/00?tab=tokens")
    tab.page.wait_for_selector(".tokpage")
    tab.page.wait_for_selector("text=step 1 has no scores: record.scores was off")
    names = tab.page.locator("button.chip:disabled").all_text_contents()
    assert names == ["Gap trainer \u2212 sampler", "Ratio and clipped", "Entropy"]
    assert "record.scores was off" in tab.page.locator("button.chip:disabled").first.get_attribute("title")
    assert tab.problems == []
