"""The named cases: echo fidelity, branching, retries, refusals."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from capture_lab import (
    END,
    FINGERPRINT,
    SHELL,
    Lab,
    answer,
    call,
    check_exported,
    reasons_of,
    row,
    says,
    system,
    trained_turns,
    user,
)

from whet.capture.forest import Forest
from whet.errors import CaptureError
from whet.types import Generation, Message, ModelRequest

SYS = system("you fix bugs")
START = [SYS, user("fix it")]


def drift(lab: Lab, messages: list[Message]) -> tuple[str, str, int | None]:
    found = lab.forest.plan(ModelRequest(messages=tuple(messages), tools=(SHELL,)), FINGERPRINT).drift
    return found.kind, found.cause, found.turn


# ---------------------------------------------------------------- echo fidelity


def test_a_plain_session_is_one_row_with_every_sampled_token() -> None:
    lab = Lab()
    first = says("look", call("c0", '{"cmd": "ls", "n": 1.0}'))
    history = [*START, first]
    assert drift(lab, START) == ("clean", "first", None)
    lab.turn(START, first)
    echoed = says("look", call("c0", '{"n":1,"cmd":"ls"}'))
    history = [*START, echoed, answer("c0")]
    assert drift(lab, history) == ("clean", "append", None)
    lab.turn(history, says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    (segment,) = trajectory.segments
    assert (segment.label, segment.kind) == ("final", "sampled")
    assert trajectory.ledger.trained == trajectory.ledger.captured == 6
    assert [t.parent for t in trajectory.turns] == [-1, 0]


def test_parallel_results_in_reverse_order_or_one_missing_continue_the_turn() -> None:
    lab = Lab()
    first = says("", call("a"), call("b"))
    lab.turn(START, first)
    for results in ([answer("b", "2"), answer("a", "1")], [answer("a", "1")]):
        plan = lab.ask([*START, first, *results]).plan
        assert plan.base == lab.calls[0].node
        assert plan.replace == tuple(results)


@pytest.mark.parametrize(
    ("echo", "cause"),
    [
        (says("look", call("c0", '{"cmd":"ls","limit":10}')), "arguments"),
        (says("look", call("c0", "{}")), "arguments"),
        (says("look", call("c0", '{"cmd":"ls"}', name="bash")), "tool name"),
        (says("look ", call("c0", '{"cmd":"ls"}')), "text"),
        (says("look", call("c0", '{"cmd":"ls"}'), reasoning="invented"), "reasoning"),
        (user("your last reply had no tool call"), "missing"),
    ],
)
def test_an_edited_turn_is_rendered_as_context_and_named(echo: Message, cause: str) -> None:
    lab = Lab()
    lab.turn(START, says("look", call("c0", '{"cmd":"ls"}')))
    history = [*START, echo, answer("c0")]
    assert drift(lab, history) == ("edited", cause, 0)
    second = lab.turn(history, says("done"))
    assert second.plan.base is None
    assert second.plan.replace == tuple(history[1:])
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    # What was sampled stays trainable in its own row; what the agent made of it is context in the other.
    assert trained_turns(lab, trajectory) == [0, 1]
    assert [s.label for s in trajectory.segments] == ["wipe", "final"]


def test_an_edit_is_blamed_on_the_turn_whose_call_id_it_carries() -> None:
    lab = Lab()
    for index, made in enumerate([lab.ask(START), lab.ask(START)]):
        lab.deliver(lab.sample(made, says("", call(f"t{index}"))))
    edited = says("", call("t0", '{"repaired":true}'))
    assert drift(lab, [*START, edited, answer("t0")]) == ("edited", "arguments", 0)


def test_a_foreign_assistant_message_is_context() -> None:
    lab = Lab()
    first = says("hello")
    lab.turn(START, first)
    history = [*START, first, user("go"), says("never sampled"), user("on")]
    assert drift(lab, history) == ("edited", "foreign", None)
    assert lab.ask(history).plan.base == lab.calls[0].node


def test_rewriting_an_old_tool_result_forks_and_re_renders_the_turns_after_it() -> None:
    lab = Lab()
    one, two = says("", call("c0")), says("", call("c1"))
    lab.turn(START, one)
    lab.turn([*START, one, answer("c0", "long")], two)
    cleared = [*START, one, answer("c0", "[cleared]"), two, answer("c1")]
    assert drift(lab, cleared) == ("fork", "context", 1)
    third = lab.turn(cleared, says("done"))
    assert third.base is lab.calls[0]
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trained_turns(lab, trajectory) == [0, 1, 2]


def test_identical_turns_are_told_apart_by_position() -> None:
    lab = Lab()
    history = [*START]
    for text in ("a", "b", "c"):
        lab.turn(history, says("OK"))
        history = [*history, says("OK"), user(text)]
    assert [made.base and made.base.turn for made in lab.calls] == [None, 0, 1]
    rewound = [*START, says("OK"), user("other")]
    assert lab.ask(rewound).base is lab.calls[0]
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert len(trajectory.segments) == 1


def test_equal_samples_are_told_apart_by_call_id_even_further_up_the_path() -> None:
    lab = Lab()
    twins = [lab.ask(START), lab.ask(START)]
    for index, made in enumerate(twins):
        lab.deliver(lab.sample(made, says("", call(f"t{index}"))))
    after: list[Message] = []
    for index in (0, 1):
        history = [*START, says("", call(f"t{index}")), answer(f"t{index}")]
        after.append(says("same"))
        made = lab.turn(history, says("same"))
        assert made.base is twins[index]
    history = [*START, says("", call("t0")), answer("t0"), says("same"), user("go")]
    assert lab.ask(history).base is lab.calls[2]


def test_of_equal_samples_the_one_delivered_last_is_continued() -> None:
    lab = Lab()
    twins = [lab.ask(START) for _ in range(3)]
    for made in twins:
        lab.sample(made, says("OK"))
    lab.deliver(twins[1])
    lab.deliver(twins[0])
    assert lab.ask([*START, says("OK"), user("go")]).base is twins[0]


def test_regenerated_call_ids_fall_back_to_meaning() -> None:
    lab = Lab()
    lab.turn(START, says("", call("c0", '{"a":1}')))
    echoed = [*START, says("", call("shell_17_0", '{"a":1}')), answer("shell_17_0")]
    assert lab.ask(echoed).base is lab.calls[0]
    again = [*START, says("", call("shell_99_0", '{"a":1}')), answer("shell_99_0")]
    assert (
        lab.forest.plan(ModelRequest(messages=tuple(again), tools=(SHELL,)), FINGERPRINT).parent is not None
    )


def test_a_call_id_on_edited_text_does_not_splice() -> None:
    lab = Lab()
    lab.turn(START, says("", call("c0", '{"a":1}')))
    assert lab.ask([*START, says("", call("c0", '{"a":2}')), answer("c0")]).base is None


def test_dropped_reasoning_still_splices_the_reasoning_tokens() -> None:
    lab = Lab()
    lab.turn(START, says("hi", reasoning="think"))
    assert lab.ask([*START, says("hi"), user("go")]).base is lab.calls[0]


def test_a_truncated_turn_is_closed_and_continued() -> None:
    lab = Lab()
    lab.deliver(lab.sample(lab.ask(START), says("half"), finish="length"))
    second = lab.turn([*START, says("half"), user("go on")], says("whole"))
    assert second.prompt[len(lab.calls[0].prompt) + 3] == END
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert trajectory.turns[0].finish == "length"
    assert lab.forest.sampled(lab.calls[0].node).finish == "length"


def test_an_empty_reply_can_be_echoed() -> None:
    lab = Lab()
    lab.deliver(lab.sample(lab.ask(START), says(), count=1))
    assert lab.ask([*START, says(), user("go")]).base is lab.calls[0]


# ---------------------------------------------------------------- branching


def test_a_rewound_request_forks_from_the_inner_turn() -> None:
    lab = Lab()
    history = [*START]
    for index in range(10):
        reply = says(f"step {index}", call(f"c{index}"))
        lab.turn(history, reply)
        history = [*history, reply, answer(f"c{index}")]
    shorter = [*history[:8], user("no, differently")]
    assert drift(lab, shorter) == ("fork", "rewind", 3)
    assert drift(lab, [*history[:7], user("stop")]) == ("fork", "rewind", None)
    assert drift(lab, history[:8]) == ("fork", "rewind", None)
    lab.turn(shorter, says("other"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert [s.label for s in trajectory.segments] == ["wipe", "final"]
    assert trajectory.segments[1].mask.sum() == 3


def test_parallel_sub_agents_with_the_main_prompt_word_for_word() -> None:
    lab = Lab()
    dispatch = says("", call("d0"), call("d1"))
    lab.turn(START, dispatch)
    subs = [lab.ask(START), lab.ask(START)]
    for index, made in enumerate(subs):
        lab.deliver(lab.sample(made, says("sub", call(f"s{index}"))))
    lab.turn([*START, dispatch, answer("d0", "started"), answer("d1", "started")], says("waiting"))
    for index in (1, 0):
        history = [*START, says("sub", call(f"s{index}")), answer(f"s{index}")]
        assert lab.turn(history, says("found")).base is subs[index]
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert not any(reasons_of(trajectory).values())
    assert trajectory.ledger.trained == trajectory.ledger.captured


def test_interleaved_sub_agents_and_the_main_line_get_their_labels() -> None:
    lab = Lab()
    dispatch = says("", call("d0"))
    lab.turn(START, dispatch)
    sub = [system("you are a sub-agent"), user("look")]
    lab.turn(sub, says("", call("s0")))
    lab.turn([*START, dispatch, answer("d0", "async")], says("meanwhile"))
    lab.turn([*sub, says("", call("s0")), answer("s0")], says("found it"))
    note = [*START, dispatch, answer("d0", "async"), says("meanwhile"), user("sub-agent: found it")]
    lab.turn(note, says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert sorted(s.label for s in trajectory.segments) == ["final", "subagent"]


def test_a_sub_agent_under_the_main_system_prompt_is_one_when_the_main_line_goes_on() -> None:
    lab = Lab()
    dispatch = says("", call("d0"))
    lab.turn(START, dispatch)
    lab.turn([SYS, user("only look")], says("found it"))
    lab.turn([*START, dispatch, answer("d0", "found it")], says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert [s.label for s in trajectory.segments] == ["subagent", "final"]


def test_compaction_to_a_new_root_wipes_the_old_line() -> None:
    lab = Lab()
    first = says("", call("c0"))
    lab.turn(START, first)
    # The summary call is offered no tools (Codex, OpenCode, Pi): it cannot act.
    summary = [system("summarise"), user("everything so far")]
    assert lab.turn(summary, says("it was long"), tools=()).plan.drift.cause == "new_root"
    window = [SYS, user("so far: it was long"), says("it was long"), user("continue")]
    assert drift(lab, window) == ("fork", "new_root", None)
    lab.turn(window, says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert [s.label for s in trajectory.segments] == ["wipe", "final"]
    assert reasons_of(trajectory) == {0: "", 1: "auxiliary", 2: ""}
    assert trajectory.ledger.excluded == {"auxiliary": 3}


def test_a_title_call_that_comes_first_is_not_the_main_line() -> None:
    lab = Lab()
    title = lab.ask([system("make a title"), user("fix it")], tools=())
    main = lab.ask(START)
    lab.deliver(lab.sample(title, says("A title")))
    lab.deliver(lab.sample(main, says("done")))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert [s.label for s in trajectory.segments] == ["final"]
    assert reasons_of(trajectory) == {0: "auxiliary", 1: ""}


def test_single_calls_without_tools_are_the_work_itself_where_no_tool_is_offered() -> None:
    lab = Lab()
    lab.turn([user("one")], says("a"), tools=())
    lab.turn([user("two")], says("b"), tools=())
    trajectory = lab.forest.trajectory()
    assert not any(reasons_of(trajectory).values())
    assert [s.label for s in trajectory.segments] == ["wipe", "final"]


def test_a_tool_list_that_grows_takes_the_main_line_along() -> None:
    lab = Lab()
    first = says("", call("c0"))
    lab.turn(START, first)
    more = replace(SHELL, name="search")
    second = lab.turn([*START, first, answer("c0")], says("done"), tools=(SHELL, more))
    assert second.plan.base is None
    assert second.plan.drift.cause == "context"
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert [s.label for s in trajectory.segments] == ["wipe", "final"]


def test_a_sub_agent_that_never_returns_and_a_session_that_ends_in_mid_call() -> None:
    lab = Lab()
    lab.turn(START, says("", call("d0")))
    lab.turn([system("sub"), user("look")], says("", call("s0")))
    lab.ask([system("sub"), user("look"), says("", call("s0")), answer("s0")])
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert sorted(s.label for s in trajectory.segments) == ["final", "subagent"]


# ---------------------------------------------------------------- delivery, retries, twins


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


def test_of_twins_the_continued_one_wins() -> None:
    lab = Lab()
    for made in [lab.ask(START) for _ in range(3)]:
        lab.deliver(lab.sample(made, says(f"try {made.turn}")))
    lab.turn([*START, says("try 1"), user("go")], says("done"))
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    assert reasons_of(trajectory) == {0: "retry_sibling", 1: "", 2: "retry_sibling", 3: ""}


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


# ---------------------------------------------------------------- demonstrations


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


# ---------------------------------------------------------------- refusals


def generation(**changes: object) -> Generation:
    values: dict[str, object] = {
        "ids": row([7, 8, 9]),
        "logprobs": np.array([-1, -2, -3], dtype=np.float32),
        "finish": "stop",
        "version_runs": ((0, 1),),
    }
    return Generation(**{**values, **changes})  # type: ignore[arg-type]


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": row([])}, "no id was sampled"),
        ({"ids": np.array([7, 8, 9])}, "int64"),
        ({"ids": row([7, -8, 9])}, "turn 5 token 1: a sampled id is negative"),
        ({"logprobs": logprobs(-1, -2)}, "turn 5 token 2: 2 logprobs for 3"),
        ({"logprobs": logprobs(-1, -2, -3, -4)}, "turn 5 token 3: 4 logprobs for 3"),
        ({"logprobs": logprobs(-1, float("nan"), -3)}, "turn 5 token 1: logprob nan"),
        ({"logprobs": logprobs(-1, -2, float("-inf"))}, "turn 5 token 2: logprob -inf"),
        ({"logprobs": logprobs(1e-6, -2, -3)}, "turn 5 token 0: logprob"),
        ({"logprobs": np.array([-1.0, -2.0, -3.0])}, "float64"),
        ({"version_runs": ()}, "turn 5 token 0: no policy version"),
        ({"version_runs": ((1, 1),)}, "turn 5 token 0: no policy version"),
        ({"version_runs": ((0, 1), (2, 2), (2, 3))}, "turn 5 token 2: version runs are not in order"),
        ({"version_runs": ((0, 1), (3, 2))}, "turn 5 token 3: a version run starts after"),
        ({"version_runs": ((0, -1),)}, "negative"),
    ],
)
def test_a_generation_that_cannot_be_trusted_is_refused(changes: dict[str, object], message: str) -> None:
    lab = Lab("run/3/1")
    made = lab.ask(START)
    with pytest.raises(CaptureError, match="run/3/1 turn 5") as raised:
        lab.forest.commit(made.context, generation(**changes), says("x"), turn=5)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(lab.forest) == 1


def test_zero_is_a_logprob() -> None:
    lab = Lab()
    lab.forest.commit(lab.ask(START).context, generation(logprobs=logprobs(0, -2, 0)), says("x"), turn=0)


def test_a_synthetic_reply_with_logprobs_is_refused() -> None:
    lab = Lab()
    with pytest.raises(CaptureError, match="synthetic"):
        lab.forest.commit(lab.ask(START).context, generation(), says("x"), turn=0, synthetic=True)


def test_turn_numbers_call_ids_and_roles_are_checked() -> None:
    lab = Lab()
    made = lab.turn(START, says("", call("c0")))
    with pytest.raises(CaptureError, match="used once"):
        lab.forest.commit(made.context, generation(), says("x"), turn=0)
    with pytest.raises(CaptureError, match="minted call id"):
        lab.forest.commit(made.context, generation(), says("", call("c0")), turn=1)
    with pytest.raises(CaptureError, match="minted call id"):
        lab.forest.commit(made.context, generation(), says("", call("n"), call("n")), turn=1)
    with pytest.raises(CaptureError, match="role assistant"):
        lab.forest.commit(made.context, generation(), user("x"), turn=1)
    with pytest.raises(CaptureError, match="not a context node"):
        lab.forest.commit(made.node, generation(), says("x"), turn=1)
    with pytest.raises(CaptureError, match="no such reason"):
        lab.forest.exclude(made.node, "boring")
    for missing in (-1, 99):
        with pytest.raises(CaptureError, match="no node"):
            lab.forest.mark_aborted(missing)
    with pytest.raises(CaptureError, match="not a sampled node"):
        lab.forest.mark_delivered(made.context)


def test_a_family_that_is_not_pure_is_found_out() -> None:
    forest = Forest("r")
    request = ModelRequest(messages=tuple(START))
    forest.extend(forest.plan(request, "f"), row([1, 2, 3]))
    with pytest.raises(CaptureError, match="token 2: the same messages"):
        forest.extend(forest.plan(request, "f"), row([1, 2, 4]))


def test_a_foreign_message_spelled_anew_keeps_the_held_ids() -> None:
    forest = Forest("r")
    sent = [user("u"), says("", call("x", '{"a":1,"b":2}')), user("v")]
    held = forest.extend(forest.plan(ModelRequest(messages=tuple(sent)), "f"), row([1, 2, 3]))
    sent[1] = says("", call("x", '{"b":2,"a":1}'))
    again = forest.extend(forest.plan(ModelRequest(messages=tuple(sent)), "f"), row([1, 3, 2]))
    assert again == held
    assert forest.path_ids(again).tolist() == [1, 2, 3]


@pytest.mark.parametrize("delta", [row([]), np.array([1, 2]), row([1, -1]), row([[1, 2]])])  # type: ignore[list-item]
def test_a_root_prompt_must_be_a_row_of_ids(delta: np.ndarray) -> None:
    forest = Forest("r")
    with pytest.raises(CaptureError):
        forest.extend(forest.plan(ModelRequest(messages=tuple(START)), "f"), delta)


def test_a_sealed_session_refuses_everything_and_repeats_its_answer() -> None:
    lab = Lab()
    made = lab.turn(START, says("a"))
    late = lab.ask([*START, says("a"), user("go")])
    sealed = lab.forest.trajectory()
    assert lab.forest.trajectory() is sealed
    with pytest.raises(CaptureError, match="turn 1 came after the session was sealed"):
        lab.forest.commit(late.context, generation(), says("x"), turn=1)
    refused = (
        lambda: lab.forest.plan(ModelRequest(messages=tuple(START)), FINGERPRINT),
        lambda: lab.forest.extend(late.plan, row([1])),
        lambda: lab.forest.mark_delivered(made.node),
        lambda: lab.forest.mark_aborted(late.context),
        lambda: lab.forest.exclude(made.node, "stale"),
    )
    for act in refused:
        with pytest.raises(CaptureError, match="sealed"):
            act()


def test_tokens_changed_after_commit_are_found_at_export() -> None:
    lab = Lab("r7")
    made = lab.turn(START, says("a"))
    held = lab.forest.sampled(made.node).ids
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 1
    held.setflags(write=True)
    held[0] = 1
    with pytest.raises(CaptureError, match="r7 segment 0 turn 0 token .*not those the engine received"):
        lab.forest.trajectory()


def test_the_callers_arrays_are_not_shared() -> None:
    forest = Forest("r")
    delta, sampled = row([1, 2, 3]), row([7, 8, 9])
    context = forest.extend(forest.plan(ModelRequest(messages=tuple(START)), "f"), delta)
    node = forest.commit(context, generation(ids=sampled), says("x"), turn=0)
    delta[:], sampled[:] = 0, 0
    assert forest.path_ids(node).tolist() == [1, 2, 3, 7, 8, 9]


# ---------------------------------------------------------------- size


def test_a_chain_of_5000_turns_is_linear_in_memory_and_needs_no_recursion() -> None:
    forest = Forest("long")
    messages: list[Message] = [user("go")]
    plan = forest.plan(ModelRequest(messages=tuple(messages)), "f")
    after = forest.plan(ModelRequest(messages=(user("next"),)), "f")
    ids = 0
    for turn in range(5000):
        context = forest.extend(plan, row([1, 2, 3]))
        node = forest.commit(context, generation(), says("OK"), turn=turn)
        forest.mark_delivered(node)
        messages += [says("OK"), user("next")]
        plan = replace(after, base=node)
        ids += 6
    started = time.perf_counter()
    found = forest.plan(ModelRequest(messages=tuple(messages)), "f")
    (segment,) = forest.trajectory().segments
    assert time.perf_counter() - started < 5
    assert found.base == node
    assert len(segment.ids) == ids
    assert segment.mask.sum() == 15_000
    held = sum(len(t.context_ids) + len(t.ids) for t in forest.trajectory().turns)
    assert held == ids


def test_1025_branches_from_one_turn() -> None:
    lab = Lab()
    first = says("", call("c0"))
    lab.turn(START, first)
    for branch in range(1025):
        made = lab.turn([*START, first, answer("c0", f"b{branch}")], says("x"))
        assert made.base is lab.calls[0]
    trajectory = lab.forest.trajectory()
    assert len(trajectory.segments) == 1025
    assert trajectory.ledger.trained == trajectory.ledger.captured == 3 * 1026
    assert sum(int(s.mask.sum()) for s in trajectory.segments) == 3 * 1026
