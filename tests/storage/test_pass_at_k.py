"""pass@k against counting every subset, and intervals against independent computations."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from insitu.storage.pass_at_k import (
    TaskCounts,
    estimate,
    mean_interval,
    pass_all_k,
    pass_at_k,
    reported_ks,
    wilson_interval,
)


def by_counting(graded: int, resolved: int, k: int) -> float:
    """The share of all k-subsets of the attempts that hold a resolved one."""
    subsets = list(itertools.combinations([i < resolved for i in range(graded)], k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def by_product(graded: int, resolved: int, k: int) -> float:
    """The numerically stable form of the paper that brought the estimator."""
    if graded - resolved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(graded - resolved + 1, graded + 1))


@pytest.mark.parametrize("graded", range(1, 9))
def test_it_is_the_share_of_subsets_with_a_solution(graded: int) -> None:
    for resolved in range(graded + 1):
        for k in range(1, graded + 1):
            assert pass_at_k(graded, resolved, k) == pytest.approx(by_counting(graded, resolved, k))


@pytest.mark.parametrize("graded", range(1, 7))
def test_all_of_k_is_the_share_of_subsets_without_a_failure(graded: int) -> None:
    for resolved in range(graded + 1):
        for k in range(1, graded + 1):
            subsets = list(itertools.combinations([i < resolved for i in range(graded)], k))
            share = sum(all(subset) for subset in subsets) / len(subsets)
            assert pass_all_k(graded, resolved, k) == pytest.approx(share)
    assert estimate([TaskCounts(graded=4, resolved=2)] * 3, 2, all_of=True).value == pytest.approx(1 / 6)


def test_large_numbers_are_exact() -> None:
    for graded, resolved, k in [(200, 3, 100), (1000, 1, 10), (1000, 999, 1), (5000, 17, 64)]:
        assert pass_at_k(graded, resolved, k) == pytest.approx(by_product(graded, resolved, k), abs=1e-12)


def test_it_is_unbiased() -> None:
    """The mean over many draws of n attempts is what k attempts really reach: 1 - (1 - p)^k."""
    rng = random.Random(5)
    p, n, k = 0.15, 10, 4
    draws = [pass_at_k(n, sum(rng.random() < p for _ in range(n)), k) for _ in range(20_000)]
    assert statistics.mean(draws) == pytest.approx(1 - (1 - p) ** k, abs=0.01)


@pytest.mark.parametrize(
    ("graded", "resolved", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)]
)
def test_what_cannot_be_is_refused(graded: int, resolved: int, k: int) -> None:
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(graded, resolved, k)


def test_wilson_solves_its_own_equation() -> None:
    """Its bounds are the rates p whose standard score of the observed rate is exactly 1.96."""
    for successes, count in [(1, 10), (5, 10), (82, 164), (163, 164), (3, 1000)]:
        rate = successes / count
        for bound in wilson_interval(rate, count):
            score = abs(rate - bound) / math.sqrt(bound * (1 - bound) / count)
            assert score == pytest.approx(1.959964, rel=1e-9)
    assert wilson_interval(0.0, 164)[0] == 0.0
    assert 0.0 < wilson_interval(0.0, 164)[1] < 0.03
    assert wilson_interval(1.0, 164)[1] == 1.0
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_one_attempt_each_is_wilsons_and_equal_attempts_count_once() -> None:
    once = estimate([TaskCounts(graded=1, resolved=int(i < 30)) for i in range(100)], 1)
    assert (once.value, once.tasks) == (0.3, 100)
    assert (once.low, once.high) == wilson_interval(0.3, 100)
    # Attempts at one task that all end alike are no more evidence than one: the interval must stay as wide.
    eight = estimate([TaskCounts(graded=8, resolved=8 * (i < 30)) for i in range(100)], 1)
    assert (eight.low, eight.high) == pytest.approx((once.low, once.high))


def test_independent_attempts_narrow_the_interval_to_that_of_their_number_at_most() -> None:
    rng = random.Random(0)
    counts = [sum(rng.random() < 0.3 for _ in range(8)) for _ in range(2000)]
    found = estimate([TaskCounts(graded=8, resolved=count) for count in counts], 1)
    low, high = wilson_interval(found.value, 16_000)
    assert high - low <= found.high - found.low == pytest.approx(high - low, rel=0.05)
    half = estimate([TaskCounts(graded=4, resolved=2)] * 10, 1)
    assert (half.low, half.high) == wilson_interval(0.5, 40)


def test_the_interval_of_many_tasks_agrees_with_the_normal_theory() -> None:
    rng = random.Random(0)
    values = [rng.choice((0.0, 0.25, 0.5, 1.0)) for _ in range(400)]
    half = 1.96 * statistics.pstdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    assert mean_interval(values, 1600) == pytest.approx((mean - half, mean + half), abs=0.002)


@pytest.mark.parametrize("resolved", [0, 4])
def test_all_alike_is_not_certain(resolved: int) -> None:
    for k, all_of in ((1, False), (2, False), (2, True)):
        found = estimate([TaskCounts(graded=4, resolved=resolved)] * 10, k, all_of=all_of)
        assert found.value == resolved / 4
        assert (found.low, found.high) == wilson_interval(resolved / 4, 10)


def test_the_intervals_of_all_levels_are_of_one_method() -> None:
    """One solved rollout of 18 gave 0 to 0.167 for avg@3 and 0 to 0.390 for the smaller pass^2."""
    tasks = [TaskCounts(graded=3, resolved=int(i == 0)) for i in range(6)]
    average, both, either = estimate(tasks, 1), estimate(tasks, 2, all_of=True), estimate(tasks, 2)
    assert both.value <= average.value <= either.value
    assert both.low <= average.low <= either.low
    assert both.high <= average.high <= either.high


@pytest.mark.parametrize(("correlated", "mean"), [(0.5, 0.3), (0.1, 0.05), (0.0, 0.3)])
def test_the_interval_holds_the_rate_of_further_tasks(correlated: float, mean: float) -> None:
    """In 93 % of evaluations of 16 tasks with 4 attempts; a bootstrap over tasks holds it in 84 to 92 %."""
    rng = np.random.default_rng(0)
    shape = 1 / correlated - 1 if correlated else 1e9
    held = 0
    for _ in range(500):
        rates = rng.binomial(4, rng.beta(mean * shape, (1 - mean) * shape, 16)) / 4
        low, high = mean_interval(rates.tolist(), 64)
        held += low <= mean <= high
    assert held >= 465


def test_tasks_with_too_few_graded_attempts_are_left_out() -> None:
    tasks = [
        TaskCounts(graded=4, resolved=4),
        TaskCounts(graded=1, resolved=0),
        TaskCounts(graded=0, resolved=0),
    ]
    assert estimate(tasks, 1).tasks == 2
    assert (estimate(tasks, 4).tasks, estimate(tasks, 4).value) == (1, 1.0)
    empty = estimate(tasks, 8)
    assert (empty.tasks, empty.low, empty.high) == (0, 0.0, 1.0)


def test_which_k_are_told() -> None:
    assert [reported_ks(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
