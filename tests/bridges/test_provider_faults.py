"""Whose fault an unanswered call is: what an agent can cause itself is not the provider's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.gateway.session import SessionStats
from insitu_bridges.provider import faults as provider_faults
from insitu_bridges.provider.faults import CALLS_AT_A_TIME, NEAR_S, FaultLog, SessionFaults


class Story:
    """Sessions A and B of one provider, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(provider_faults, "time", SimpleNamespace(monotonic=lambda: self.now))
        log = FaultLog()
        self.a, self.b = SessionFaults(log, SessionStats()), SessionFaults(log, SessionStats())

    def call(self, who: SessionFaults, seconds: float = 1.0, cause: str = "", **more: Any) -> None:
        """One call; without a cause it is answered."""
        began, self.now = self.now, self.now + seconds
        if cause:
            who.met_trouble()
        who.ended(
            began,
            answered=not cause,
            cause=cause,
            surely=more.get("surely", False),
            load=more.get("load", False),
        )
        self.now += 0.1


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    return Story(monkeypatch)


def test_a_single_unanswered_call_at_the_end_is_the_sessions_own(story: Story) -> None:
    story.call(story.a)
    story.call(story.a, cause="HTTP 500")
    assert story.a.fault() == ""


def test_who_never_had_an_answer_has_not_failed_by_itself(story: Story) -> None:
    story.call(story.a, cause="HTTP 500")
    assert story.a.fault() == "HTTP 500"


def test_what_no_request_can_cause_is_the_providers(story: Story) -> None:
    story.call(story.a)
    story.call(story.a, cause="HTTP 401", surely=True)
    story.call(story.b)
    assert story.a.fault() == "HTTP 401"
    story.call(story.a)
    assert story.a.fault() == ""


def test_who_asks_again_and_is_not_answered_is_believed_unless_others_are_served(story: Story) -> None:
    story.call(story.a)
    for _ in range(2):
        story.call(story.a, cause="HTTP 500")
    assert story.a.fault() == "HTTP 500"
    story.call(story.b)
    assert story.a.fault() == ""


def test_calls_sent_at_once_are_not_asking_again(story: Story) -> None:
    story.call(story.a)
    began = story.now
    for _ in range(40):
        story.now += 1.0
        story.a.ended(began, answered=False, cause="HTTP 500", surely=False, load=False)
    assert story.a.fault() == ""


def test_a_call_from_before_an_answer_counts_no_more(story: Story) -> None:
    story.call(story.a)
    began = story.now
    story.call(story.a)
    story.now += 5.0
    for _ in range(2):
        story.a.ended(began, answered=False, cause="HTTP 500", surely=False, load=False)
    assert story.a.fault() == ""


@pytest.mark.parametrize("load", [True, False])
def test_trouble_of_another_session_shows_it_unless_a_third_is_served(story: Story, load: bool) -> None:
    third = SessionFaults(story.a._log, SessionStats())
    story.call(story.a)
    story.call(story.a, cause="HTTP 429", load=load)
    story.call(story.b, cause="HTTP 429", load=load)
    assert story.a.fault() == "HTTP 429"
    story.call(third)
    assert (story.a.fault() != "") is load


def test_trouble_of_another_session_before_an_own_answer_or_much_later_shows_nothing(story: Story) -> None:
    story.call(story.b, cause="HTTP 500")
    story.call(story.a)
    story.call(story.a, cause="HTTP 500")
    story.now += NEAR_S + 1
    story.call(story.b, cause="HTTP 500")
    assert story.a.fault() == ""


def test_waits_that_overlap_are_counted_once(story: Story) -> None:
    stats = story.a._stats
    with story.a.waiting():
        story.now += 2.0
        with story.a.waiting():
            story.now += 3.0
        story.now += 1.0
    story.now += 9.0
    assert stats.waited_s == pytest.approx(6.0)


async def test_a_session_has_few_calls_at_a_time_and_a_wait_behind_them_is_its_own(story: Story) -> None:
    inside, go = [0, 0], asyncio.Event()

    async def one() -> None:
        async with story.a.place():
            inside[0] += 1
            inside[1] = max(inside)
            with story.a.waiting():
                await go.wait()
            inside[0] -= 1

    many = [asyncio.ensure_future(one()) for _ in range(3 * CALLS_AT_A_TIME)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    story.now += 5.0
    many[-1].cancel()
    go.set()
    await asyncio.wait(many)
    assert (inside[1], story.a._stats.waited_s) == (CALLS_AT_A_TIME, 0.0)
