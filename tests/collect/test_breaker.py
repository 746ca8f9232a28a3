"""The breaker stops a run after failures in a row, with the last cause."""

from __future__ import annotations

import pytest

from insitu.collect.breaker import LOST, Breaker
from insitu.errors import SandboxError


def test_failures_in_a_row_stop_the_run_with_the_last_cause() -> None:
    breaker = Breaker(limit=3)
    breaker.record(True, "first")
    breaker.record(True, "second")
    with pytest.raises(SandboxError, match="3 attempts in a row failed; the last: disk gone"):
        breaker.record(True, "disk gone")


def test_a_success_resets_the_count() -> None:
    breaker = Breaker(limit=2)
    for _ in range(5):
        breaker.record(True, "flaky")
        breaker.record(False, "")


def test_the_attempts_of_one_lost_node_are_one_failure() -> None:
    breaker = Breaker(limit=2)
    for _ in range(10):
        breaker.record(True, f"{LOST}p0, start 1: it is gone")
    with pytest.raises(SandboxError, match="start 2"):
        breaker.record(True, f"{LOST}p0, start 2: it is gone")
