"""Admission, window and staleness as arithmetic."""

from __future__ import annotations

from insitu.collect.staleness import leaves_room, places, slack, too_old, window


def test_places_and_window() -> None:
    assert [places(8, s) for s in (0, 1, 2)] == [8, 16, 24]
    assert [window(0.3, 8, s) for s in (0, 1, 2)] == [2, 4, 7]
    assert window(0.3, 1, 0) == 1
    assert window(1.0, 8, 2) == 24


def test_staleness_is_measured_from_the_oldest_token_and_what_has_none_is_never_too_old() -> None:
    assert not too_old(5, 7, 2)
    assert too_old(5, 8, 2)
    assert not too_old(None, 100, 0)
    assert [slack(5, v, 2) for v in (5, 6, 7)] == [2, 1, 0]
    assert slack(None, 9, 2) == 2


def test_a_younger_group_may_overtake_only_where_every_older_one_still_finds_a_place() -> None:
    # Two places are left now and two per later batch.
    assert leaves_room(0, [0, 0, 2], 2, 2), "what is due is taken"
    assert not leaves_room(2, [0, 0, 2], 2, 2), "two are due now, and two places are left"
    assert leaves_room(2, [0, 2, 2], 2, 2)
    assert not leaves_room(2, [0, 1, 1, 1, 2], 2, 2), "four must fit into this batch and the next"
    assert leaves_room(1, [0, 1, 1, 1, 2], 2, 2), "it is one of the four itself"
