"""The failure experiment: nothing happens where nothing fails, and each habit does what it is known to do."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks._failures_ahead import DEADLINE_S, MEDIAN_S, ahead, credits_ahead, dying
from benchmarks._failures_run import Trouble
from benchmarks._failures_world import MOST_TRIES, TRIES, Setting, World, collected, credits_of
from benchmarks.failures import MEASURES, _cases, sums_of, table
from insitu_train.plan.step import PlanConfig

pytestmark = pytest.mark.slow

PLAN = PlanConfig()


@cache
def cases(rate: float, chances: Any) -> list[dict[str, Any]]:
    world = World(100, 0)
    calm = Setting(rate=0.0, chances="uncorrelated")
    truth = sums_of(
        world, credits_of(world, calm, asyncio.run(collected(world, calm, TRIES)), "insitu", PLAN)
    )
    return asyncio.run(_cases(world, truth, rate, chances, 0, PLAN))


def case(
    rate: float, chances: Any, treatment: str, tries: int = 1, *, redraw: bool = False
) -> dict[str, Any]:
    wanted = (treatment, tries, redraw)
    (found,) = [c for c in cases(rate, chances) if (c["treatment"], c["tries"], c["redraw"]) == wanted]
    return found


def test_without_failures_every_treatment_gives_the_same_advantages() -> None:
    for found in cases(0.0, "uncorrelated"):
        assert {found[m]["bias"] for m in MEASURES if m != "kept"} == {0.0}
        assert found["kept"]["share"] == 1.0


@pytest.mark.parametrize("chances", ["uncorrelated", "correlated"])
def test_tries_again_until_graded_gives_back_the_advantages_of_a_world_without_failures(chances: str) -> None:
    found = case(0.05, chances, "insitu", MOST_TRIES)
    assert found["ungraded"] == 0.0 < 0.03 < found["failed_first"] < 0.07
    assert {found[m]["bias"] for m in MEASURES if m != "kept"} == {0.0}
    assert found["kept"]["share"] == 1.0


def test_reward_0_takes_credit_from_solutions_whose_sandbox_died() -> None:
    found = case(0.15, "uncorrelated", "reward_0")
    assert found["solved"]["high"] < -0.05
    insitu = case(0.15, "uncorrelated", "insitu", TRIES)
    assert abs(insitu["solved"]["bias"]) < 0.01
    assert insitu["kept"]["share"] > 0.97


def test_dropping_groups_loses_most_of_them_and_not_any_of_them_where_length_matters() -> None:
    assert case(0.15, "uncorrelated", "drop_group")["kept"]["high"] < 0.5
    found = case(0.15, "correlated", "drop_group")
    assert found["unsolved"]["high"] < 0
    assert found["hard"]["bias"] < -0.05


def test_further_tries_are_needed_where_long_rollouts_fail_more() -> None:
    """What one try leaves out is not a fair part of the rollouts."""
    once, thrice = case(0.15, "correlated", "no_retry"), case(0.15, "correlated", "insitu", TRIES)
    assert once["unsolved"]["high"] < 0
    assert abs(once["unsolved"]["bias"]) > 1.5 * abs(thrice["unsolved"]["bias"])


def test_failures_come_at_their_rate_and_hit_long_rollouts_where_they_should() -> None:
    world = World(400, 1)
    for chances in ("uncorrelated", "correlated"):
        failed = world.failures(Setting(rate=0.15, chances=chances))[:, :, 0]  # type: ignore[arg-type]
        assert failed.mean() == pytest.approx(0.15, abs=0.015)
        gap = world.log_length[:, :, 0][failed].mean() - world.log_length[:, :, 0][~failed].mean()
        assert (gap > 0.4) == (chances == "correlated")


def test_a_further_try_is_the_same_draw_unless_asked_for() -> None:
    world = World(50, 0)
    same, other = (
        Setting(rate=0.1, chances="correlated"),
        Setting(rate=0.1, chances="correlated", redraw=True),
    )
    places = [(g, s) for g in range(50) for s in range(8)]
    assert all(world.draw(g, s, 3, same) == world.draw(g, s, 1, same) for g, s in places)
    assert np.mean([world.draw(g, s, 3, other) != world.draw(g, s, 1, other) for g, s in places]) > 0.99


def test_the_table_has_a_line_for_each_case() -> None:
    assert len(table(cases(0.05, "correlated")).splitlines()) == 2 + len(cases(0.05, "correlated"))


def test_injected_trouble_is_a_function_of_its_place() -> None:
    one, other = Trouble(rate=0.2), Trouble(rate=0.2)
    struck = [one.strikes("engine", 0.2, "train/1/0/0", 1, turn) for turn in range(1000)]
    assert struck == [other.strikes("engine", 0.2, "train/1/0/0", 1, turn) for turn in range(1000)]
    assert 150 < sum(struck) == one.failed["engine"] < 250


LATE = Setting(rate=0.1, chances="correlated")


def test_sandboxes_die_in_the_middle_at_their_rate() -> None:
    world = World(400, 1)
    takes = MEDIAN_S * np.exp(world.log_length)
    for chances in ("uncorrelated", "correlated"):
        dies = dying(takes, world.luck, Setting(rate=0.15, chances=chances))  # type: ignore[arg-type]
        assert (dies < np.minimum(takes, DEADLINE_S))[:, :, 0].mean() == pytest.approx(0.15, abs=0.015)


def test_ahead_of_the_trainer_a_late_failure_leaves_no_bias_and_shared_time_would() -> None:
    """What insitu grades is what a world without failures grades; a further try with what the lost one left
    is stopped, and graded 0, for the sandbox that died."""
    world = World(160, 0)
    calm = ahead(world, Setting(rate=0.0, chances="uncorrelated"))
    truth = {r.id: (r.reward, r.status) for groups in calm.batches for g in groups for r in g.rollouts}
    wrong = {}
    for rule in ("insitu", "shared_time"):
        found = ahead(world, LATE, rule)  # type: ignore[arg-type]
        assert 0.07 < found.failed_first < 0.13
        graded = [r for groups in found.batches for g in groups for r in g.rollouts if r.reward is not None]
        wrong[rule] = sum((r.reward, r.status) != truth[r.id] for r in graded)
    assert wrong["insitu"] == 0 < wrong["shared_time"]
    assert len(credits_ahead(world, LATE, ahead(world, LATE), PLAN)) > 400
