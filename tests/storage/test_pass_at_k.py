"""pass@k against counting every subset, and intervals against independent computations."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from insitu.storage.pass_at_k import (
    TaskCounts,
    bootstrap,
    estimate,
    mean_change,
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


def test_the_bootstrap_agrees_with_the_normal_theory_and_repeats() -> None:
    rng = random.Random(0)
    values = [rng.choice((0.0, 0.25, 0.5, 1.0)) for _ in range(400)]
    low, high = bootstrap(values, seed=3)
    half = 1.96 * statistics.pstdev(values) / math.sqrt(len(values))
    assert low == pytest.approx(statistics.mean(values) - half, abs=0.004)
    assert high == pytest.approx(statistics.mean(values) + half, abs=0.004)
    assert bootstrap(values, seed=3) == (low, high)
    assert bootstrap(values, seed=4) != (low, high)


def test_the_bootstrap_takes_many_tasks_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.0, 1.0] * 50
    whole = bootstrap(values, seed=1)
    monkeypatch.setattr("insitu.storage.pass_at_k.CHUNK", 999)
    low, high = bootstrap(values, seed=1)
    assert (low, high) == pytest.approx(whole, abs=0.02)


def test_one_attempt_each_is_wilsons_and_several_are_resampled_by_task() -> None:
    once = estimate([TaskCounts(graded=1, resolved=int(i < 30)) for i in range(100)], 1)
    assert (once.value, once.method, once.tasks) == (0.3, "wilson", 100)
    assert (once.low, once.high) == wilson_interval(0.3, 100)
    # Attempts at one task that all end alike are no more evidence than one: the interval must stay as wide.
    eight = estimate([TaskCounts(graded=8, resolved=8 * (i < 30)) for i in range(100)], 1)
    assert (eight.value, eight.method) == (0.3, "bootstrap")
    assert eight.high - eight.low == pytest.approx(once.high - once.low, rel=0.1)


def test_all_alike_is_not_certain() -> None:
    none = estimate([TaskCounts(graded=4, resolved=0)] * 10, 2)
    assert (none.value, none.low, none.method) == (0.0, 0.0, "wilson")
    assert none.high > 0.2
    half = estimate([TaskCounts(graded=4, resolved=2)] * 10, 1)
    assert half.low < 0.5 < half.high


def test_tasks_with_too_few_graded_attempts_are_left_out() -> None:
    tasks = [
        TaskCounts(graded=4, resolved=4),
        TaskCounts(graded=1, resolved=0),
        TaskCounts(graded=0, resolved=0),
    ]
    assert estimate(tasks, 1).tasks == 2
    assert (estimate(tasks, 4).tasks, estimate(tasks, 4).value) == (1, 1.0)
    empty = estimate(tasks, 8)
    assert (empty.tasks, empty.low, empty.high, empty.method) == (0, 0.0, 1.0, "none")


def test_which_k_are_told() -> None:
    assert [reported_ks(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_a_paired_interval_is_newcombes() -> None:
    """The example of Newcombe (1998): 36 tasks solved both times, 2 before only, 12 after only."""
    before, after = [1.0] * 38 + [0.0] * 12, [1.0] * 36 + [0.0] * 2 + [1.0] * 12
    assert mean_change(before, after, seed=0) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    assert mean_change(after, before, seed=0) == pytest.approx((-0.2, -0.3404, -0.0569), abs=1e-4)


@pytest.mark.parametrize("rates", [([0.0] * 4, [0.0] * 4), ([0.0] * 3, [1.0] * 3), ([0.5], [0.75])])
def test_tasks_that_all_change_alike_leave_an_interval(rates: tuple[list[float], list[float]]) -> None:
    value, low, high = mean_change(*rates, seed=0)
    assert -1.0 <= low < value <= high <= 1.0
    assert high - low > 0.3
