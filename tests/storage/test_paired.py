"""Changes between two evaluations of the same tasks against Newcombe, McNemar and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from insitu.storage.pass_at_k import TaskCounts
from insitu_train.paired import mean_change, sign_flip_p

Pairs = list[tuple[TaskCounts, TaskCounts]]


def once(both: int, only_a: int, only_b: int, neither: int) -> Pairs:
    """Return pairs of one attempt on each side."""
    cells = [(1, 1)] * both + [(1, 0)] * only_a + [(0, 1)] * only_b + [(0, 0)] * neither
    return [(TaskCounts(graded=1, resolved=a), TaskCounts(graded=1, resolved=b)) for a, b in cells]


def several(graded: int, counts: list[tuple[int, int]]) -> Pairs:
    return [(TaskCounts(graded=graded, resolved=a), TaskCounts(graded=graded, resolved=b)) for a, b in counts]


def change(pairs: Pairs) -> tuple[float, float, float]:
    found = mean_change(pairs)
    assert found is not None
    assert found.tasks == len(pairs)
    return found.value, found.low, found.high


def test_a_paired_interval_is_newcombes() -> None:
    """The example of Newcombe (1998): 36 tasks solved both times, 2 before only, 12 after only."""
    assert change(once(36, 2, 12, 0)) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    assert change(once(36, 12, 2, 0)) == pytest.approx((-0.2, -0.3404, -0.0569), abs=1e-4)


def test_nothing_in_common_is_no_change() -> None:
    assert mean_change([]) is None
    assert sign_flip_p([]) == 1.0


@pytest.mark.parametrize(
    "pairs", [once(0, 0, 0, 4), once(0, 0, 3, 0), several(4, [(2, 3)]), several(4, [(1, 2)] * 8)]
)
def test_tasks_that_all_change_alike_leave_an_interval(pairs: Pairs) -> None:
    value, low, high = change(pairs)
    assert -1.0 <= low <= value <= high <= 1.0
    assert high - low > 0.3


@pytest.mark.parametrize(
    ("only_a", "only_b"), [(0, 0), (1, 2), (3, 3), (0, 8), (2, 12), (40, 71), (480, 520)]
)
def test_with_one_attempt_the_test_is_mcnemars(only_a: int, only_b: int) -> None:
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    assert sign_flip_p(once(5, only_a, only_b, 5)) == pytest.approx(min(1.0, 2 * tail / 2**n))


def test_the_test_of_rates_counts_the_signs_that_change_as_much() -> None:
    rng = random.Random(1)
    for _ in range(20):
        pairs = [
            (
                TaskCounts(graded=a, resolved=rng.randint(0, a)),
                TaskCounts(graded=b, resolved=rng.randint(0, b)),
            )
            for a, b in rng.choices([(4, 4), (3, 4), (2, 3)], k=8)
        ]
        changes = [12 * b.resolved // b.graded - 12 * a.resolved // a.graded for a, b in pairs]
        flipped = [
            abs(sum(sign * change for sign, change in zip(signs, changes, strict=True)))
            for signs in itertools.product((-1, 1), repeat=8)
        ]
        share = sum(value >= abs(sum(changes)) for value in flipped) / len(flipped)
        assert sign_flip_p(pairs) == pytest.approx(share)


@pytest.mark.parametrize("graded", [3, 10])
def test_the_order_of_the_tasks_changes_nothing(graded: int) -> None:
    rng = random.Random(0)
    after = [(1, number % (graded + 1)) for number in range(11)]
    found = []
    for _ in range(50):
        rng.shuffle(after)
        found.append(change(several(graded, after)))
    assert all(one == pytest.approx(found[0], abs=1e-9) for one in found)


def test_very_many_tasks_are_tested_with_a_normal_distribution() -> None:
    counts = [(0, 1)] * 560 + [(1, 0)] * 500
    exact = sign_flip_p(several(2, [(0, 1)] * 530 + [(1, 0)] * 470))
    assert 0.0 < sign_flip_p(several(2, counts)) == pytest.approx(exact, abs=0.02)
    assert sign_flip_p(once(0, 0, 5000, 0)) < 1e-9


def test_rates_change_where_no_majority_does() -> None:
    """One solved rollout of 18 before and two after: a majority of three rollouts is on neither side."""
    value, low, high = change(several(3, [(1, 1), (0, 1), *[(0, 0)] * 4]))
    assert value == pytest.approx(1 / 18)
    assert low < 0 < high


def drawn(tasks: int, attempts: int, seed: int) -> Pairs:
    """Return attempts at tasks of very different difficulty, which become somewhat easier."""
    rng = np.random.default_rng(seed)
    base = rng.beta(0.6, 0.6, tasks)
    after = np.clip(base + rng.normal(0.06, 0.1, tasks), 0, 1)
    return several(
        attempts, list(zip(rng.binomial(attempts, base), rng.binomial(attempts, after), strict=True))
    )


@pytest.mark.parametrize(("tasks", "attempts"), [(30, 16), (12, 8), (60, 4)])
def test_the_interval_is_as_wide_as_the_changes_of_the_tasks_vary(tasks: int, attempts: int) -> None:
    """The interval of the mean of so many changes, by Student's t, to a few percent."""
    own = others = 0.0
    for seed in range(100):
        pairs = drawn(tasks, attempts, seed)
        _, low, high = change(pairs)
        own += high - low
        others += 2 * 2.05 * np.std([b.rate - a.rate for a, b in pairs], ddof=1) / math.sqrt(tasks)
    assert 0.9 < own / others < 1.1


@pytest.mark.parametrize(("tasks", "attempts"), [(30, 16), (30, 1), (8, 4), (5, 3)])
def test_the_interval_and_the_test_agree(tasks: int, attempts: int) -> None:
    disagreed, significant = 0, 0
    for seed in range(150):
        pairs = drawn(tasks, attempts, seed)
        _, low, high = change(pairs)
        significant += (rejected := sign_flip_p(pairs) < 0.05)
        disagreed += rejected and low <= 0.0 <= high
        assert rejected or low <= 0.0 <= high
    assert disagreed <= 1
    assert significant < 150


def test_counts_without_a_common_measure_overflow_nothing() -> None:
    rng = random.Random(2)
    for size in (10**9, 10**30, 10**200):
        counts = [rng.randrange(size, 2 * size) for _ in range(40)]
        pairs = [
            (
                TaskCounts(graded=n, resolved=rng.randrange(n)),
                TaskCounts(graded=n + 1, resolved=rng.randrange(n)),
            )
            for n in counts
        ]
        assert 0.0 <= sign_flip_p(pairs) <= 1.0
        _, low, high = change(pairs)
        assert -1.0 <= low <= high <= 1.0
