"""Why an echo is not what was sampled: closed causes, the arguments concerned, the first token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from capture_lab import START, Lab, answer, call, respelled, row, says, user

from insitu.capture.drift_diagnosis import CAUSES, Diagnosis, diagnose, first_token
from insitu.types import IntArray, Message
from insitu_train.run_report import drift_totals

HELD = says(" look\n", call("c0", '{"cmd": "ls", "n": 5, "deep": true}'), reasoning="because")


def ids_of(message: Message) -> IntArray:
    """Characters as ids; refuses nothing."""
    said = message.reasoning + "|" + message.text
    return row([ord(c) for c in said + "".join(f"<{c.name}{c.arguments}>" for c in message.tool_calls)])


def with_arguments(text: str) -> list[Message]:
    return [replace(HELD, tool_calls=(call("c0", text),)), answer("c0")]


@pytest.mark.case(20, 21, 22, 23)
@pytest.mark.parametrize(
    ("echo", "cause", "detail"),
    [
        ([replace(HELD, text="look")], "text trimmed", ""),
        ([replace(HELD, text=" look\nhere")], "text", ""),
        ([replace(HELD, text="")], "text", ""),
        ([replace(HELD, reasoning="other")], "reasoning", ""),
        ([replace(HELD, tool_calls=())], "call missing", ""),
        ([replace(HELD, tool_calls=(*HELD.tool_calls, call("c9")))], "call added", ""),
        (
            [replace(HELD, tool_calls=(replace(HELD.tool_calls[0], name="bash"),))],
            "tool name",
            "shell -> bash",
        ),
        (with_arguments('{"cmd":"ls","n":5,"deep":true,"limit":9}'), "default added", "shell limit"),
        (with_arguments('{"cmd":"ls","deep":true}'), "argument dropped", "shell n"),
        (with_arguments('{"cmd":"ls","n":"5","deep":"True"}'), "type coerced", "shell deep n"),
        (with_arguments('{"cmd":["ls"],"n":5,"deep":true}'), "type coerced", "shell cmd"),
        (with_arguments('{"cmd":"pwd","n":5,"deep":true}'), "arguments", "shell cmd"),
        (with_arguments('{"cmd":"ls","m":5,"deep":true}'), "arguments", "shell m n"),
        (with_arguments("{broken"), "arguments", "shell"),
        (with_arguments("[1]"), "arguments", "shell"),
        ([user("no tool call was found")], "missing", ""),
        ([], "missing", ""),
        ([says(" look\n"), replace(HELD, text="")], "split", ""),
        ([says(" loo"), says("k\n", *HELD.tool_calls), answer("c0")], "split", ""),
        ([says(" look\n"), user("by the way"), replace(HELD, text="")], "call missing", ""),
    ],
)
def test_each_edit_has_its_cause(echo: list[Message], cause: str, detail: str) -> None:
    assert diagnose(HELD, echo) == Diagnosis(cause=cause, detail=detail)
    assert cause in CAUSES


@pytest.mark.case(20)
@pytest.mark.parametrize("echo", ["{}", '{"cmd": "ls"}', ""])
def test_repaired_json_is_named(echo: str) -> None:
    held = replace(HELD, tool_calls=(call("c0", '{"cmd": "ls'),))
    assert diagnose(held, with_arguments(echo)).cause == "invalid JSON repaired"


def test_an_echo_that_names_two_turns_is_merged() -> None:
    assert diagnose(HELD, [HELD], turns_named=2).cause == "merged"


def test_the_first_token_is_where_the_edit_is_not_where_the_spelling_changes() -> None:
    sampled = ids_of(HELD)
    echo = replace(respelled(HELD, "sorted"), reasoning="")
    assert first_token(HELD, replace(echo, text=" look"), sampled, ids_of) == len("because| look")
    added = replace(echo, tool_calls=(call("c0", '{"cmd": "ls", "n": 6, "deep": true}'),))
    assert chr(sampled[first_token(HELD, added, sampled, ids_of)]) == "5"


def test_a_split_that_no_tokenizer_would_choose_still_has_a_first_token() -> None:
    odd = row([1, 2, 3])
    assert first_token(HELD, replace(HELD, text="x"), odd, ids_of) == 0
    assert first_token(HELD, HELD, odd, lambda message: None) == -1
    assert first_token(HELD, HELD, ids_of(HELD), ids_of) == len(ids_of(HELD))


def test_hostile_echoes_have_a_cause() -> None:
    rng = random.Random(3)
    texts = ["", "x", "{", "[" * 2000, '{"a":' * 2000, "9" * 10_000, '{"a":1e999}', '"\ud800"', "null", "[]"]
    for _ in range(400):
        held, got = (
            says(rng.choice(texts), *(call(str(i), rng.choice(texts)) for i in range(rng.randrange(3))))
            for _ in range(2)
        )
        found = diagnose(held, [got] * rng.randrange(3), turns_named=rng.randrange(3))
        assert found.cause in CAUSES
        assert len(found.detail) <= 120


@pytest.mark.case(20, 21)
def test_a_forest_keeps_and_exports_its_drifts() -> None:
    lab = Lab()
    first = says("look", call("c0", '{"cmd":"ls"}'))
    lab.turn(START, first)
    edited = [*START, replace(first, tool_calls=(call("c0", '{"cmd":"ls","limit":9}'),)), answer("c0")]
    plan = lab.ask(edited).plan
    lab.turn(edited, says("done"))
    assert plan.drift.node == lab.calls[0].node
    assert plan.replace[plan.drift.at] == edited[2]
    (note,) = lab.forest.drifts
    assert (note.kind, note.cause, note.turn, note.request) == ("edited", "arguments", 0, 2)
    assert (note.token, note.tokens) == (-1, 3)
    lab.turn([user("elsewhere")], says("x"))
    trajectory = lab.forest.trajectory()
    assert trajectory.drifts == lab.forest.drifts
    assert [n.cause for n in trajectory.drifts] == ["arguments", "new_root"]


def test_a_diagnosis_replaces_the_coarse_cause_and_counts_from_its_token() -> None:
    lab = Lab()
    one, two = says("", call("c0")), says("", call("c1"))
    lab.turn(START, one)
    lab.turn([*START, one, answer("c0")], two)
    history = [*START, replace(one, text="!"), answer("c0"), two, answer("c1")]
    plan = lab.forest.plan(lab.request(history), "toy")
    found = Diagnosis(cause="text", detail="", token=1)
    context = lab.forest.extend(plan, row([1, 2]), found)
    (note,) = lab.forest.drifts
    assert (note.cause, note.turn, note.token, note.request) == ("text", 0, 1, -1)
    assert note.tokens == 2 + 3, "the edited turn from its token on, and the later turn that is rendered anew"
    lab.forest.mark_aborted(context)
    assert drift_totals(lab.forest.drifts) == ["total edited text: 1, 5 sampled tokens concerned"]
    assert drift_totals(()) == []


def test_hints_are_labels_of_turns_and_never_keys() -> None:
    lab = Lab()
    lab.turn(START, says("a"), hints=(("agent", "one\ud800"),))
    lab.turn([*START, says("a"), user("go")], says("b"), hints=(("agent", "two" * 1000),) * 40)
    lab.turn([*START, says("a"), user("go"), says("b"), user("on")], says("c"))
    assert [made.base for made in lab.calls] == [None, *lab.calls[:2]]
    turns = lab.forest.trajectory().turns
    assert turns[0].hints == (("agent", "one?"),)
    assert len(turns[1].hints) == 16
    assert len(turns[1].hints[0][1]) == 256
    assert turns[2].hints == ()
