"""Edits without a look, played through agent, gateway and grader: they solve nothing."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.no_read_baseline import measure
from insitu.config import demo_preset, load_config
from insitu_train.demo.demonstrator import Habits

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("anchor", [False, True])
def test_an_agent_that_does_not_look_solves_nothing(anchor: bool) -> None:
    config = load_config(None, ["harness.agent=script", "harness.workers=2"], demo_preset())
    scores = asyncio.run(measure(config, 8, anchor=anchor))
    assert (scores[""].solved, scores[""].total) == (0, 8)


def test_the_same_agent_with_a_look_solves_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the zero above is worth: the same path, tasks and edit, given what the file contains."""
    monkeypatch.setattr("benchmarks.no_read_baseline.BLIND", Habits(look=1.0, wrong=0.0, verify=0.0))
    config = load_config(None, ["harness.agent=script", "harness.workers=2"], demo_preset())
    scores = asyncio.run(measure(config, 8))
    assert (scores[""].solved, scores[""].total) == (8, 8)
