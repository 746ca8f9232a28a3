"""Signed node pointers: a hint among equals, worthless when forged, foreign or on edited text."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from capture_lab import SHELL, START, Lab, call, check_exported, says, user

from insitu.capture.turn_refs import sign, verify

KEY, OTHER = b"k" * 32, b"o" * 32


def test_a_pointer_names_its_node_under_its_own_key_only() -> None:
    for node in (0, 7, 2**32 - 1):
        assert verify(KEY, sign(KEY, node)) == node
        assert verify(OTHER, sign(KEY, node)) is None
    assert len({sign(KEY, node) for node in range(300)}) == 300


def test_without_a_key_nothing_is_signed_and_nothing_verifies() -> None:
    assert sign(b"", 3) == ""
    assert verify(b"", sign(KEY, 3)) is None
    assert verify(b"", "") is None


def test_a_pointer_survives_clients_that_decode_and_encode_the_field() -> None:
    text = sign(KEY, 1234)
    assert base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
    assert base64.urlsafe_b64encode(base64.urlsafe_b64decode(text)).decode() == text


def test_every_change_of_one_character_is_noticed() -> None:
    text = sign(KEY, 77)
    for at in range(len(text)):
        for other in "0fgW":
            changed = text[:at] + other + text[at + 1 :]
            assert changed == text or verify(KEY, changed) is None
    for odd in (
        "",
        text + "0",
        text[:-1],
        text + "\n",
        " " + text,
        text.upper(),
        "insitu\ud800",
        "0" * 10**6,
    ):
        assert verify(KEY, odd) is None


@pytest.mark.case(27)
def test_identical_turns_from_one_prompt_are_told_apart_by_pointer() -> None:
    lab = Lab(pointer_key=KEY)
    twins = [lab.ask(START) for _ in range(3)]
    for made in twins:
        lab.deliver(lab.sample(made, says("OK")))
    for made in (twins[1], twins[0], twins[2]):
        echo = replace(says("OK"), pointers=("unknown", lab.forest.pointer(made.node)))
        assert lab.ask([*START, echo, user(f"on {made.turn}")]).base is made


@pytest.mark.case(27)
def test_a_pointer_beats_a_call_id_and_a_call_id_beats_the_last_delivery() -> None:
    lab = Lab(pointer_key=KEY)
    twins = [lab.ask(START) for _ in range(3)]
    for index, made in enumerate(twins):
        lab.deliver(lab.sample(made, says("", call(f"t{index}"))))
    by_id = says("", call("t1"))
    assert lab.ask([*START, by_id, user("a")]).base is twins[1]
    both = replace(by_id, pointers=(lab.forest.pointer(twins[0].node),))
    assert lab.ask([*START, both, user("b")]).base is twins[0]
    assert lab.ask([*START, says("", call("new")), user("c")]).base is twins[2]


@pytest.mark.case(28)
def test_removed_forged_and_foreign_pointers_change_nothing() -> None:
    lab, foreign = Lab(pointer_key=KEY), Lab(pointer_key=OTHER)
    first, second = lab.ask(START), lab.ask(START)
    for made in (first, second):
        lab.deliver(lab.sample(made, says("OK")))
    elsewhere = foreign.turn(START, says("OK"))
    forged = lab.forest.pointer(first.node)[:-1] + "g"
    for pointers in ((), (forged,), (foreign.forest.pointer(elsewhere.node),), ("insitu" + "0" * 40,), ("",)):
        echo = replace(says("OK"), pointers=pointers)
        made = lab.ask([*START, echo, user(f"on {pointers}")])
        assert made.base is second
        assert made.plan.drift.kind == "clean" or made.plan.drift.cause == "rewind"
        lab.deliver(lab.sample(made, says("done")))
    check_exported(lab, lab.forest.trajectory())


@pytest.mark.case(28)
def test_a_valid_pointer_on_edited_text_does_not_splice_but_names_the_turn() -> None:
    lab = Lab(pointer_key=KEY)
    twins = [lab.turn(START, says(text)) for text in ("first", "second")]
    edited = replace(says("never said"), pointers=(lab.forest.pointer(twins[0].node),))
    made = lab.ask([*START, edited, user("on")])
    assert made.base is None
    assert (made.plan.drift.kind, made.plan.drift.cause, made.plan.drift.turn) == ("edited", "text", 0)


@pytest.mark.case(28)
def test_a_signed_number_that_is_no_sampled_node_is_ignored() -> None:
    lab = Lab(pointer_key=KEY)
    first = lab.turn(START, says("OK"))
    for node in (first.context, 999, 2**32 - 1):
        echo = replace(says("OK"), pointers=(sign(KEY, node),))
        assert lab.ask([*START, echo, user(f"{node}")], (SHELL,)).base is first
