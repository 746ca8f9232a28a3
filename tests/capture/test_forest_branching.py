"""What agents do to a conversation: sub-agents, compaction of every style, other tools, samples on purpose.

Every session is exported and checked token by token; each test says where the sampled tokens end up.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from capture_lab import (
    SHELL,
    START,
    SYS,
    Lab,
    answer,
    call,
    check_exported,
    check_views,
    reasons_of,
    says,
    system,
    trained_turns,
    user,
)

from insitu.types import Message, Trajectory

SEARCH = replace(SHELL, name="search")


def export(lab: Lab) -> Trajectory:
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    check_views(trajectory)
    return trajectory


def labels(trajectory: Trajectory) -> list[str]:
    return [segment.label for segment in trajectory.segments]


def work(lab: Lab, history: list[Message], turns: int, name: str = "c") -> list[Message]:
    """`turns` tool calls in a row; returns the conversation so far."""
    for index in range(turns):
        said = says(f"{name} {index}", call(f"{name}{index}", f'{{"n":{index}}}'))
        lab.turn(history, said)
        history = [*history, said, answer(f"{name}{index}", f"{name} result {index}")]
    return history


@pytest.mark.case(14)
def test_results_in_any_order_or_missing_stay_one_line() -> None:
    lab = Lab()
    said = says("", call("a"), call("b"), call("c"))
    lab.turn(START, said)
    history = [*START, said, answer("c", "3"), answer("a", "1")]
    lab.turn(history, says("done"))
    trajectory = export(lab)
    assert labels(trajectory) == ["final"]
    assert trained_turns(lab, trajectory) == [0, 1]


@pytest.mark.case(15)
def test_an_agent_that_gives_every_call_the_same_id_stays_on_its_line() -> None:
    lab = Lab()
    history = list(START)
    for index in range(4):
        lab.turn(history, says(f"step {index}", call(f"minted{index}")))
        history = [*history, says(f"step {index}", call("same")), answer("same", f"result {index}")]
    assert [made.base for made in lab.calls] == [None, *lab.calls[:3]]
    assert labels(export(lab)) == ["final"]


@pytest.mark.case(26)
def test_an_agent_that_drops_call_ids_stays_on_its_line() -> None:
    lab = Lab()
    history = list(START)
    for index in range(3):
        lab.turn(history, says(f"step {index}", call(f"m{index}a"), call(f"m{index}b")))
        history = [*history, says(f"step {index}", call(""), call("")), answer("", "one"), answer("", "two")]
    assert [made.base for made in lab.calls] == [None, *lab.calls[:2]]
    assert labels(export(lab)) == ["final"]


@pytest.mark.case(29)
def test_two_sub_agents_under_the_same_system_prompt_interleave_with_the_parent() -> None:
    lab = Lab()
    dispatch = says("", call("d0"), call("d1"))
    lab.turn(START, dispatch)
    main = [*START, dispatch, answer("d0", "launched"), answer("d1", "launched")]
    subs = {name: [SYS, user(f"look at {name}")] for name in "ab"}
    for step in range(3):
        for name in "ba" if step % 2 else "ab":
            subs[name] = work(lab, subs[name], 1, f"{name}{step}")
        main = work(lab, main, 1, f"m{step}")
    for name in "ab":
        lab.turn(subs[name], says(f"{name} is done"))
    lab.turn([*main, user("both are done")], says("thanks"))
    trajectory = export(lab)
    assert sorted(labels(trajectory)) == ["final", "subagent", "subagent"]
    assert not any(reasons_of(trajectory).values())
    assert trajectory.ledger.trained == trajectory.ledger.captured


@pytest.mark.case(30)
def test_a_result_that_comes_as_a_user_notification_many_turns_later_continues_the_parent() -> None:
    lab = Lab()
    dispatch = says("", call("d0"))
    lab.turn(START, dispatch)
    sub = work(lab, [system("sub"), user("look")], 2, "s")
    main = work(lab, [*START, dispatch, answer("d0", "launched")], 8)
    lab.turn(sub, says("found it"))
    last = lab.turn([*main, user("<task-notification>found it</task-notification>")], says("done"))
    assert last.plan.drift.cause == "append"
    trajectory = export(lab)
    assert sorted(labels(trajectory)) == ["final", "subagent"]
    assert trajectory.ledger.trained == trajectory.ledger.captured


@pytest.mark.case(31)
def test_nested_sub_agents_of_which_one_never_returns_when_the_session_ends_in_mid_call() -> None:
    lab = Lab()
    dispatch, deeper = says("", call("d0")), says("", call("n0"))
    lab.turn(START, dispatch)
    sub = [system("sub"), user("look")]
    lab.turn(sub, deeper)
    inner = work(lab, [system("inner"), user("look closer")], 2, "i")
    main = work(lab, [*START, dispatch, answer("d0", "launched")], 1)
    lab.sample(lab.ask(inner), says("never written to the client"))
    lab.ask([*sub, deeper, answer("n0")])
    lab.ask(main)
    trajectory = export(lab)
    assert sorted(labels(trajectory)) == ["final", "subagent", "subagent"]
    assert trajectory.ledger.excluded == {"undelivered": 3}
    assert trajectory.ledger.trained == trajectory.ledger.captured - 3


@pytest.mark.case(32)
def test_a_twin_root_that_diverges_keeps_both_lines() -> None:
    lab = Lab()
    first, second = lab.ask(START), lab.ask(START)
    assert first.context == second.context
    for made, name in ((second, "b"), (first, "a")):
        lab.deliver(lab.sample(made, says(name, call(f"{name}0"))))
    for made, name in ((first, "a"), (second, "b")):
        line = [*START, says(name, call(f"{name}0")), answer(f"{name}0")]
        assert lab.turn(line, says(f"{name} is done")).base is made
    trajectory = export(lab)
    assert len(trajectory.segments) == 2
    assert trained_turns(lab, trajectory) == [0, 2, 1, 3]


@pytest.mark.case(33)
def test_compaction_that_extends_the_line_then_starts_a_window_under_the_same_root() -> None:
    """Claude Code: the request to summarise follows the whole history, with the same system and tools."""
    lab = Lab()
    history = work(lab, START, 4)
    summary = lab.turn([*history, user("Respond with TEXT ONLY")], says("it was long"))
    assert summary.plan.drift.cause == "append"
    window = [SYS, user("so far: it was long"), system("note"), says("understood"), user("continue")]
    work(lab, window, 2, "w")
    trajectory = export(lab)
    assert labels(trajectory) == ["wipe", "final"]
    assert trajectory.ledger.trained == trajectory.ledger.captured == 3 * 7


@pytest.mark.case(33)
def test_compaction_under_a_new_root_without_tools() -> None:
    """Codex: the full history and a request to summarise, with no tools; then developer, user, summary."""
    lab = Lab()
    history = work(lab, START, 4)
    summary = lab.turn([*history, user("CONTEXT CHECKPOINT COMPACTION")], says("it was long"), tools=())
    assert summary.base is None
    assert summary.plan.echoes == {made.node for made in lab.calls[:4]}
    work(lab, [SYS, user("fix it"), user("summary: it was long")], 2, "w")
    trajectory = export(lab)
    assert labels(trajectory) == ["wipe", "final"]
    assert reasons_of(trajectory)[4] == "auxiliary"
    assert trajectory.ledger.excluded == {"auxiliary": 3}
    (note,) = [note for note in trajectory.drifts if note.request == 4]
    assert (note.kind, note.cause, note.tokens) == ("fork", "context", 12)


@pytest.mark.case(33)
@pytest.mark.parametrize("last", [False, True])
def test_compaction_by_flattened_text(last: bool) -> None:
    """OpenCode, and Pi after its final answer: another system prompt, no tools, the history as one text."""
    lab = Lab()
    history = work(lab, START, 3)
    flat = "\n".join(message.text for message in history)
    if last:
        lab.turn(history, says("final answer"))
    lab.turn(
        [system("summarise"), user(f"<conversation>{flat}</conversation>")], says("it was long"), tools=()
    )
    if not last:
        work(lab, [SYS, user("fix it"), says("it was long"), user("continue")], 2, "w")
    trajectory = export(lab)
    assert labels(trajectory) == (["final"] if last else ["wipe", "final"])
    assert trajectory.ledger.excluded == {"auxiliary": 3}


@pytest.mark.case(33)
def test_compaction_in_three_steps_of_an_agent_without_tools() -> None:
    """Terminus-2: a summary, questions about it in a fresh conversation, their answers from the old line."""
    lab = Lab()
    history = [user("fix it")]
    for index in range(3):
        lab.turn(history, says(f"step {index}"), tools=())
        history = [*history, says(f"step {index}"), user(f"screen {index}")]
    history = [*history[:-1], user("summarise")]
    lab.turn(history, says("summary"), tools=())
    lab.turn([user("what would you ask about: summary")], says("questions"), tools=())
    history = [*history, says("summary"), user("questions")]
    lab.turn(history, says("answers"), tools=())
    window = [user("fix it"), says("questions"), user("answers")]
    lab.turn(window, says("on we go"), tools=())
    lab.turn([*window, says("on we go"), user("screen")], says("done"), tools=())
    trajectory = export(lab)
    assert labels(trajectory) == ["subagent", "wipe", "final"]
    assert trajectory.ledger.trained == trajectory.ledger.captured == 3 * 8


@pytest.mark.case(34)
def test_a_compaction_that_was_rejected_and_asked_again_keeps_both_answers() -> None:
    lab = Lab()
    history = work(lab, START, 2)
    ask = [*history, user("Respond with TEXT ONLY")]
    lab.turn(ask, says("", call("x")))
    again = lab.turn(ask, says("it was long"))
    assert again.plan.drift.cause == "same_prompt"
    lab.turn([SYS, user("so far: it was long")], says("done"))
    trajectory = export(lab)
    assert not any(reasons_of(trajectory).values())
    assert labels(trajectory) == ["wipe", "wipe", "final"]


@pytest.mark.case(35)
@pytest.mark.parametrize(
    "later",
    [
        (SHELL, SEARCH, replace(SHELL, name="edit")),
        (SEARCH, SHELL),
        (SHELL, replace(SEARCH, description="deferred")),
        (SHELL,),
    ],
)
def test_a_changed_tool_list_starts_a_root_that_takes_the_main_line_along(later: tuple[object, ...]) -> None:
    lab = Lab()
    said = says("", call("c0"))
    lab.turn(START, said, tools=(SHELL, SEARCH))
    history = [*START, said, answer("c0")]
    second = lab.turn(history, says("on", call("c1")), tools=later)  # type: ignore[arg-type]
    assert second.base is None
    assert (second.plan.drift.cause, second.plan.drift.turn) == ("context", 0)
    third = lab.turn([*history, says("on", call("c1")), answer("c1")], says("done"), tools=later)  # type: ignore[arg-type]
    assert third.base is second
    trajectory = export(lab)
    assert labels(trajectory) == ["wipe", "final"]
    assert trained_turns(lab, trajectory) == [0, 1, 2]


def test_a_final_answer_with_the_tools_barred_is_main_line() -> None:
    lab = Lab()
    history = work(lab, START, 2)
    lab.turn(history, says("The answer."), tool_choice_none=True)
    trajectory = export(lab)
    assert reasons_of(trajectory) == {0: "", 1: "", 2: ""}
    assert labels(trajectory) == ["wipe", "final"]


def test_the_line_goes_on_after_a_plan_with_the_tools_barred() -> None:
    lab = Lab()
    history = work(lab, START, 1)
    lab.turn(history, says("The plan."), tool_choice_none=True)
    history = work(lab, [*history, says("The plan."), user("do it")], 1, "d")
    lab.turn([SYS, user("so far: d 0")], says("", call("e0")))
    lab.turn([SYS, user("so far: d 0"), says("", call("e0")), answer("e0")], says("done"))
    trajectory = export(lab)
    assert not any(reasons_of(trajectory).values())
    assert labels(trajectory) == ["wipe", "wipe", "final"]


def test_a_call_that_cannot_act_is_auxiliary_whatever_it_sends() -> None:
    """No tools sent with the history, as in a summary; tools sent and barred without it, as in a title."""
    lab = Lab()
    history = work(lab, START, 1)
    lab.turn([*history, user("summarise")], says("it was long"), tools=())
    lab.turn([SYS, user("a title, please")], says("A title"), tool_choice_none=True)
    lab.turn(history, says("done"))
    trajectory = export(lab)
    assert reasons_of(trajectory) == {0: "", 1: "auxiliary", 2: "auxiliary", 3: ""}


@pytest.mark.case(36)
def test_a_request_shorter_than_the_last_one_forks_from_any_turn() -> None:
    for back_to in range(10):
        lab = Lab()
        history = work(lab, START, 10)
        shorter = [*history[: 2 + 2 * back_to], user("differently")]
        made = lab.turn(shorter, says("other way"))
        assert made.base is (lab.calls[back_to - 1] if back_to else None)
        trajectory = export(lab)
        assert labels(trajectory) == ["wipe", "final"]
        assert trajectory.ledger.trained == trajectory.ledger.captured == 33


@pytest.mark.case(37)
@pytest.mark.parametrize("title_first", [True, False])
def test_a_title_call_beside_the_first_call_is_never_the_main_line(title_first: bool) -> None:
    lab = Lab()
    title = [system("make a title"), user("fix it")]
    asks = {"title": lambda: lab.ask(title, ()), "main": lambda: lab.ask(START)}
    names = ["title", "main"] if title_first else ["main", "title"]
    made = {name: asks[name]() for name in names}
    first = says("", call("c0"))
    for name in reversed(names):
        lab.deliver(lab.sample(made[name], first if name == "main" else says("A title")))
    assert lab.turn([*START, first, answer("c0")], says("done")).base is made["main"]
    trajectory = export(lab)
    assert labels(trajectory) == ["final"]
    assert trajectory.ledger.excluded == {"auxiliary": 3}


@pytest.mark.case(38)
def test_four_samples_asked_for_on_purpose_are_four_samples() -> None:
    lab = Lab()
    twins = [lab.ask(START) for _ in range(4)]
    for made in (twins[2], twins[0], twins[3], twins[1]):
        lab.deliver(lab.sample(made, says(f"way {made.turn}")))
    assert len({made.context for made in twins}) == 1
    assert len({made.node for made in twins}) == 4
    trajectory = export(lab)
    assert trajectory.ledger.trained == trajectory.ledger.captured == 12
    assert len(trajectory.segments) == 4


@pytest.mark.case(38)
def test_samples_asked_for_on_purpose_count_when_the_agent_goes_on_with_one() -> None:
    lab = Lab()
    twins = [lab.ask(START) for _ in range(4)]
    for made in twins:
        lab.deliver(lab.sample(made, says(f"way {made.turn}")))
    lab.turn([*START, says("way 2"), user("this one")], says("done"))
    trajectory = export(lab)
    assert sorted(trained_turns(lab, trajectory)) == [0, 1, 2, 3, 4]
    assert trajectory.ledger.excluded == {}


# ------------------------------------------------------------ calls without tools


@pytest.mark.parametrize("reflected", [False, True])
def test_the_commit_message_of_an_agent_without_tools_is_auxiliary(reflected: bool) -> None:
    """As aider asks: it streams its edits, and asks for the commit message whole. Each prompt of its line is
    rewritten around examples that were never sampled."""
    lab = Lab()
    head = [SYS, user("an example"), says("an example's answer")]
    edit, message = says("f\n<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE"), says("fix: write b")
    lab.turn([*head, user("fix it")], edit, tools=(), stream=True)
    commit = [system("You write one-line commit messages."), user(f"USER: fix it\nASSISTANT: {edit.text}")]
    lab.turn(commit, message, tools=())
    if reflected:
        done = [user("committed as 1f, commit msg: fix: write b"), says("Ok.")]
        again = [*head, user("fix it"), edit, *done, user("the linter says: f:1 E1")]
        lab.turn(again, says("f\n<<<<<<< SEARCH\nb\n=======\nc"), tools=(), stream=True)
        lab.turn([commit[0], user("USER: the linter says")], says("fix: write c"), tools=())
    trajectory = export(lab)
    side = {1, 3} if reflected else {1}
    assert {turn for turn, why in reasons_of(trajectory).items() if why} == side
    assert trajectory.ledger.excluded == {"auxiliary": 3 * len(side)}
    assert labels(trajectory)[-1] == "final"


def test_an_architect_and_its_editor_are_trained_where_both_are_streamed() -> None:
    lab = Lab()
    lab.turn([system("architect"), user("fix it")], says("Replace a by b in f."), tools=(), stream=True)
    lab.turn([system("editor"), user("Replace a by b in f.")], says("f: a -> b"), tools=(), stream=True)
    lab.turn([system("commit"), user("diff")], says("fix: b"), tools=())
    assert [turn for turn, why in reasons_of(export(lab)).items() if why] == [2]


def test_a_call_repeated_without_a_stream_is_no_side_call() -> None:
    """Agents do so where a stream broke; the system prompt is the line's."""
    lab = Lab()
    lab.turn([SYS, user("fix it")], says("f: a -> b"), tools=(), stream=True)
    lab.turn([SYS, user("fix the other")], says("g: a -> b"), tools=())
    assert not any(reasons_of(export(lab)).values())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("title_first", [True, False])
def test_of_single_calls_that_nothing_links_all_are_trained(title_first: bool, stream: bool) -> None:
    lab = Lab()
    title = ([system("make a title"), user("fix it")], says("A title"))
    calls = [title, ([SYS, user("fix it")], says("f: a -> b"))]
    for messages, reply in calls if title_first else reversed(calls):
        lab.turn(messages, reply, tools=(), stream=stream)
    assert not any(reasons_of(export(lab)).values())


def test_a_structured_answer_after_the_last_message_is_the_line() -> None:
    """As LangGraph asks: the whole history again, without tools, below one more system text."""
    lab = Lab()
    history = work(lab, START, 2)
    done = says("Done.")
    lab.turn(history, done)
    lab.turn([system("Answer as JSON."), *history[1:], done], says('{"done": true}'), tools=())
    trajectory = export(lab)
    assert not any(reasons_of(trajectory).values())
    assert labels(trajectory) == ["wipe", "final"]


def test_steps_of_a_pipeline_without_tools_are_trained() -> None:
    """An architect's reply is the editor's task (aider), a planner's stands within the coder's (any)."""
    lab = Lab()
    lab.turn([system("architect"), user("fix it")], says("Replace a by b in f."), tools=())
    lab.turn([system("editor"), user("Replace a by b in f.")], says("f: a -> b"), tools=())
    lab.turn(
        [system("reviewer"), user("Judge this change:\nf: a -> b\nIs it right?")], says("Yes."), tools=()
    )
    assert not any(reasons_of(export(lab)).values())
    other = Lab()
    other.turn([system("architect"), user("fix it")], says("Replace a by b in f."), tools=())
    other.turn([system("Your plan: Replace a by b in f."), user("go")], says("done"), tools=())
    assert not any(reasons_of(export(other)).values())


def test_the_same_question_about_many_things_is_trained() -> None:
    lab = Lab()
    for number in range(4):
        lab.turn([SYS, user(f"translate {number}")], says(f"number {number}"), tools=())
    assert not any(reasons_of(export(lab)).values())


@pytest.mark.parametrize("system_of_b", ["B answers.", "same"])
def test_the_answer_after_a_handoff_is_the_line(system_of_b: str) -> None:
    """As the Agents SDK hands over: B has no tools, and is given the conversation with A's call."""
    lab = Lab()
    ask = user("Who are you?")
    moved = says("", call("h0"))
    lab.turn([SYS, ask], moved)
    head = SYS if system_of_b == "same" else system(system_of_b)
    lab.turn([head, ask, moved, answer("h0", "transferred")], says("I am B."), tools=())
    trajectory = export(lab)
    assert not any(reasons_of(trajectory).values())
    assert labels(trajectory) == ["wipe", "final"]


def test_side_calls_are_trained_where_the_session_says_so() -> None:
    lab = Lab(train_auxiliary=True)
    work(lab, START, 2)
    lab.turn([system("make a title"), user("fix it")], says("A title"), tools=())
    trajectory = export(lab)
    assert not any(reasons_of(trajectory).values())
    assert labels(trajectory) == ["final", "subagent"]
