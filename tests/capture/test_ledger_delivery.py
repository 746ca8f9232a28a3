"""Which turns count: delivery, retries, twins, demonstrations."""

from __future__ import annotations

from capture_lab import (
    FINGERPRINT,
    SHELL,
    START,
    Lab,
    answer,
    call,
    check_exported,
    reasons_of,
    says,
    trained_turns,
    user,
)

from insitu.types import Message, ModelRequest


def drift(lab: Lab, messages: list[Message]) -> tuple[str, str, int | None]:
    found = lab.forest.plan(ModelRequest(messages=tuple(messages), tools=(SHELL,)), FINGERPRINT).drift
    return found.kind, found.cause, found.turn


def test_a_reply_lost_on_the_way_is_excluded_and_its_retry_counts() -> None:
    lab = Lab()
    lost = lab.abort(lab.sample(lab.ask(START), says("a")))
    assert drift(lab, START) == ("clean", "same_prompt", None)
    again = lab.turn(START, says("b"))
    assert again.context == lost.context
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert reasons_of(trajectory) == {0: "undelivered", 1: ""}


def test_a_lost_reply_that_is_echoed_counts_after_all() -> None:
    lab = Lab()
    lab.abort(lab.sample(lab.ask(START), says("a")))
    lab.turn([*START, says("a"), user("go")], says("b"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert not any(reasons_of(trajectory).values())


def test_a_reply_nobody_marked_is_not_delivered() -> None:
    lab = Lab()
    lab.sample(lab.ask(START), says("a"))
    trajectory = lab.forest.trajectory()
    assert reasons_of(trajectory) == {0: "undelivered"}
    assert trajectory.segments == ()


def test_a_replayed_reply_counts_as_delivered() -> None:
    lab = Lab()
    made = lab.abort(lab.sample(lab.ask(START), says("a")))
    lab.deliver(made)
    assert reasons_of(lab.forest.trajectory()) == {0: ""}


def test_four_twins_in_flight_all_count_when_none_is_continued() -> None:
    lab = Lab()
    for made in [lab.ask(START) for _ in range(4)]:
        lab.deliver(lab.sample(made, says(f"try {made.turn}")))
    assert len({made.context for made in lab.calls}) == 1
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trained_turns(lab, trajectory) == [0, 1, 2, 3]
    assert [s.label for s in trajectory.segments] == ["append", "append", "append", "final"]


def test_twins_sent_on_purpose_count_when_one_of_them_is_continued() -> None:
    lab = Lab()
    for made in [lab.ask(START) for _ in range(3)]:
        lab.deliver(lab.sample(made, says(f"try {made.turn}")))
    lab.turn([*START, says("try 1"), user("go")], says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert not any(reasons_of(trajectory).values())


def test_of_twins_and_a_retry_as_many_count_as_were_wanted_the_continued_one_first() -> None:
    """Two were wanted; the first was lost and asked for again, and came all the same."""
    lab = Lab()
    lost, twin = lab.ask(START), lab.ask(START)
    lab.deliver(lab.sample(twin, says("b")))
    lab.abort(lab.sample(lost, says("a")))
    again = lab.turn(START, says("c"))
    lab.turn([*START, says("a"), user("go")], says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert reasons_of(trajectory) == {lost.turn: "", twin.turn: "retry_sibling", again.turn: "", 3: ""}


def test_a_repeat_after_full_delivery_is_a_new_sample_on_purpose() -> None:
    lab = Lab()
    lab.turn(START, says("a"))
    lab.turn(START, says("b"))
    trajectory = lab.forest.trajectory()
    assert trained_turns(lab, trajectory) == [0, 1]


def test_of_a_reply_and_its_retry_that_both_arrive_only_the_last_counts() -> None:
    lab = Lab()
    first = lab.abort(lab.sample(lab.ask(START), says("a")))
    lab.turn(START, says("b"))
    lab.deliver(first)
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert reasons_of(trajectory) == {0: "", 1: "retry_sibling"}


def test_a_request_without_a_generation_leaves_no_trace_in_the_account() -> None:
    lab = Lab()
    lab.abort(lab.ask(START))
    lab.turn(START, says("a"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trajectory.ledger.captured == trajectory.ledger.trained == 3


def test_a_synthetic_reply_is_never_trained_even_when_continued() -> None:
    lab = Lab()
    lab.deliver(lab.sample(lab.ask(START), says("budget used up"), synthetic=True))
    lab.turn([*START, says("budget used up"), user("go")], says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trajectory.ledger.excluded == {"synthetic": 3}
    assert trained_turns(lab, trajectory) == [1]


def test_an_excluded_turn_stays_excluded_when_it_is_continued() -> None:
    lab = Lab()
    made = lab.turn(START, says("a"))
    lab.forest.exclude(made.node, "stale")
    lab.forest.exclude(made.node, "overlong")
    lab.turn([*START, says("a"), user("go")], says("b"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trajectory.ledger.excluded == {"stale": 3}
    assert trained_turns(lab, trajectory) == [1]


def test_an_aborted_turn_without_a_token_is_kept_and_costs_nothing() -> None:
    lab = Lab()
    lab.abort(lab.sample(lab.ask(START), says(), count=0, finish="abort"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trajectory.turns[0].excluded == "undelivered"
    assert trajectory.ledger.captured == 0


def test_demonstrated_turns_make_demonstrated_rows_that_rl_does_not_count() -> None:
    lab = Lab()
    lab.deliver(lab.sample(lab.ask(START), says("a"), demonstrated=True))
    lab.deliver(lab.sample(lab.ask([*START, says("a"), user("go")]), says("b"), demonstrated=True))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    (segment,) = trajectory.segments
    assert segment.kind == "demonstrated"
    assert segment.mask.sum() == 6
    assert trajectory.ledger.trained == 0
    assert trajectory.ledger.excluded == {"demonstrated": 6}


def test_a_mixed_session_gives_rows_of_either_kind() -> None:
    lab = Lab()
    lab.deliver(lab.sample(lab.ask(START), says("a"), demonstrated=True))
    lab.turn([*START, says("a"), user("go")], says("b"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    shown, drawn = trajectory.segments
    assert (shown.kind, int(shown.mask.sum())) == ("demonstrated", 3)
    assert (drawn.kind, int(drawn.mask.sum()), len(drawn.ids) > len(shown.ids)) == ("sampled", 3, True)
    assert trajectory.ledger.excluded == {"demonstrated": 3}
    assert trajectory.ledger.trained == 3


def test_versions_follow_the_runs_within_a_turn() -> None:
    lab = Lab()
    lab.version = 4
    lab.deliver(lab.sample(lab.ask(START), says("a"), count=5, bump_at=2))
    (segment,) = lab.forest.trajectory().segments
    assert segment.versions[segment.mask].tolist() == [4, 4, 5, 5, 5]


def test_a_turn_that_only_another_root_shows_was_delivered_all_the_same() -> None:
    """A dropped stream whose reply the agent had, then compaction with the whole history and no tools."""
    lab = Lab()
    lost = lab.ask(START)
    lab.abort(lab.sample(lost, says("", call("c0"))))
    again = lab.turn(START, says("", call("c1")))
    lab.turn([*START, says("", call("c0")), answer("c0"), user("summarise")], says("short"), tools=())
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert reasons_of(trajectory) == {lost.turn: "", again.turn: "retry_sibling", 2: "auxiliary"}
