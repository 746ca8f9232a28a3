"""A provider that is away: what a user sees, and when calls and runs no longer wait."""

from __future__ import annotations

import pytest

from insitu.errors import EngineUnavailable
from insitu_bridges.provider.limits import MIN_OUTAGE_S, Outage


class Away:
    """An outage whose clock the test turns."""

    def __init__(self, max_wait_s: float) -> None:
        self.now, self.said = 100.0, list[str]()
        self.outage = Outage("http://p", max_wait_s, self.said.append, lambda: self.now)

    def fail_for(self, seconds: float) -> None:
        for _ in range(int(seconds) + 1):
            self.outage.failed("Connection refused")
            self.now += 1.0


def test_it_is_said_within_seconds_and_once_and_so_is_its_end() -> None:
    away = Away(120.0)
    away.fail_for(5)
    (line,) = away.said
    assert line == (
        "the provider at http://p does not answer: Connection refused; asking again for 120 s"
        " (engine.max_wait_s)"
    )
    away.outage.check()
    away.outage.answered()
    assert away.said[1:] == ["the provider at http://p answers again, after 6 s"]
    assert away.outage.lasted_s == 0.0


def test_one_failure_is_not_said() -> None:
    away = Away(120.0)
    away.outage.failed("HTTP 503")
    away.outage.answered()
    away.now += 600.0
    away.outage.failed("HTTP 503")
    assert away.said == []
    away.outage.check()


def test_two_failures_with_nobody_asking_between_are_no_outage() -> None:
    away = Away(120.0)
    away.outage.failed("Connection reset by peer")
    away.now += 3600.0
    away.outage.check()
    away.outage.failed("Connection reset by peer")
    away.outage.check()
    assert away.said == []


@pytest.mark.parametrize(("max_wait_s", "limit_s"), [(120.0, 120.0), (0.0, MIN_OUTAGE_S)])
def test_a_run_ends_once_the_patience_of_a_call_is_over(max_wait_s: float, limit_s: float) -> None:
    away = Away(max_wait_s)
    away.fail_for(limit_s - 2)
    assert not away.outage.over
    away.outage.check()
    away.now += 2.0
    # That much later is not that much longer away: no call was made.
    assert not away.outage.over
    away.outage.failed("Connection refused")
    assert away.outage.over
    with pytest.raises(EngineUnavailable, match=r"http://p has not answered for \d+ s .*: Connection"):
        away.outage.check()
