"""A run that gets worse says so: skipped steps in a row, a reward that falls slowly, entropy that is gone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from insitu_train.alarms import CollapseAlarm


def steps(
    rewards: Sequence[float | None], entropies: Sequence[float | None] = (), skipped: Sequence[str] = ()
) -> list[Mapping[str, Any]]:
    made = []
    for i, reward in enumerate(rewards):
        why = skipped[i] if i < len(skipped) else ""
        entropy = entropies[i] if i < len(entropies) else 1.0
        made.append({"reward_mean": reward, "entropy": None if why else entropy, "skipped": why})
    return made


def reported(run: Sequence[Mapping[str, Any]], share: float = 0.5) -> dict[int, list[str]]:
    watch = CollapseAlarm(share)
    return {i: lines for i, step in enumerate(run) if (lines := watch.look(step))}


RISING = [0.1 + 0.05 * i for i in range(12)]
FALLING = [0.65 - 0.04 * i for i in range(14)]


def test_a_reward_that_falls_slowly_is_told_once_and_again_after_it_recovered() -> None:
    assert reported(steps(RISING)) == {}
    found = reported(steps(RISING + FALLING))
    assert list(found) == [12 + 10]
    (line,) = found[22]
    assert line.startswith("the mean reward of the last 4 steps is 0.31, the best was 0.63 (")
    again = reported(steps(RISING + FALLING + RISING + FALLING))
    assert len(again) == 2
    assert reported(steps(RISING + FALLING), share=0.0) == {}


@pytest.mark.parametrize("rewards", [[0.5, 0.4, 0.6, 0.5] * 6, [0.08, 0.0, 0.02, 0.0] * 6, [0.0] * 20])
def test_what_jumps_about_is_not_told(rewards: list[float]) -> None:
    assert reported(steps(rewards)) == {}


@pytest.mark.parametrize("groups", [4, 12])
def test_chance_alone_is_told_in_few_runs(groups: int) -> None:
    """A policy that does not change on tasks solved always or never, and one on a plateau."""
    alarms = 0
    for seed in range(40):
        rng = random.Random(seed)
        rewards = [sum(rng.random() < 0.3 for _ in range(groups)) / groups for _ in range(100)]
        alarms += bool(reported(steps(rewards)))
        learnt = [min(0.95, 0.3 + 0.02 * i) + rng.gauss(0, 0.02) for i in range(100)]
        alarms += bool(reported(steps(learnt, [max(0.05, 1.0 - 0.03 * i) for i in range(100)])))
    assert alarms <= 4, "of 80 runs"


def test_an_entropy_that_is_gone_is_told_unless_the_reward_is_at_its_best() -> None:
    gone = [1.0] * 8 + [0.05] * 8
    assert reported(steps(RISING + [0.7] * 4, gone)) == {}
    found = reported(steps([0.5] * 8 + [0.3] * 8, gone))
    assert list(found) == [11]
    assert "the entropy of the last 4 steps is 0.05 nats, the best was 1" in found[11][0]


def test_steps_in_a_row_without_an_update_are_told_at_three_six_and_twelve() -> None:
    reason = "nothing to train"
    found = reported(steps([None] * 13, skipped=[reason] * 13))
    assert list(found) == [2, 5, 11]
    assert found[2] == ["3 steps in a row without an update, the last because nothing to train"]
    assert reported(steps([0.5] * 6, skipped=[reason, reason, "", reason, reason, ""])) == {}


def test_a_resumed_run_goes_on_where_it_stood() -> None:
    run = steps(RISING + FALLING)
    watch = CollapseAlarm(0.5, run[:20])
    assert [bool(watch.look(step)) for step in run[20:]] == [i == 2 for i in range(6)]
    assert not any(CollapseAlarm(0.5, run[:23]).look(step) for step in run[23:])
