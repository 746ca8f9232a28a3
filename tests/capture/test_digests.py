from __future__ import annotations

import pytest
from capture_lab import SHELL, answer, call, says, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.capture.digests import (
    MessageHasher,
    PartDigests,
    canonical_arguments,
    declared_defaults,
    digest,
    leading_system,
    root_key,
    same_meaning,
    system_digest,
    tools_digest,
    wire_digest,
)
from insitu.capture.drift import difference
from insitu.capture.message_history import MessageDigest
from insitu.types import Message, ToolSpec


def meaning(message: Message) -> MessageDigest:
    return MessageHasher().meaning(message)


def parts_of(message: Message) -> PartDigests:
    return MessageHasher().parts(message)


def meanings(messages: list[Message]) -> list[MessageDigest]:
    reported = MessageHasher().conversation(messages)
    return [reported[i] for i in range(len(reported))]


@pytest.mark.case(13, 18, 19)
@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ('{"b": 1, "a": [2, {"d":3,"c":4}]}', '{"a":[2,{"c":4,"d":3}],"b":1}'),
        ('{"p":"caf\\u00e9 a\\/b"}', '{"p":"café a/b"}'),
        ('{"n": 1.50}', '{"n":1.5}'),
        ('{"n": 1.0}', '{"n":1}'),
        ('{"n": -0.0}', '{"n":0}'),
        ('{"n": 1e21}', '{"n":1000000000000000000000}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"n": 1e2}', '{"n":100.00}'),
        ('{"a":{"x":1,"x":{"y":0}}}', '{"a":{"x":{"y":-0}}}'),
        ("", "{}"),
        ("null", "{}"),
        (" {\n} ", "{}"),
    ],
)
def test_the_same_arguments_in_another_spelling_are_the_same(sampled: str, echoed: str) -> None:
    assert canonical_arguments(sampled) == canonical_arguments(echoed)


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ('{"a":1}', '{"a":1,"limit":10}'),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":true}', '{"a":1}'),
        ('{"a":false}', '{"a":"False"}'),
        ('{"a":null}', '{"a":""}'),
        ('{"a":', "{}"),
        ('{"a": NaN}', '{"a":null}'),
        ('{"a":9007199254740993}', '{"a":9007199254740992}'),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"n": 1e400}', '{"n":null}'),
        ('{"n": 1e400}', '{"n":1e401}'),
        ('{"n": 18446744073709551616}', '{"n":18446744073709551617}'),
    ],
)
def test_arguments_of_another_value_differ(sampled: str, echoed: str) -> None:
    assert canonical_arguments(sampled) != canonical_arguments(echoed)


@pytest.mark.case(15)
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '"\ud800"', "\x00", '"\\ud800"']
)
def test_hostile_arguments_have_a_key(text: str) -> None:
    assert meaning(says("", call("c", text))) == MessageHasher().meaning(says("", call("c", text)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_re_dumping_never_changes_the_key(value: dict[str, object], ascii_only: bool) -> None:
    import json

    echoed = json.dumps(dict(reversed(value.items())), ensure_ascii=ascii_only, indent=2)
    assert canonical_arguments(json.dumps(value)) == canonical_arguments(echoed)


def test_surrounding_whitespace_of_text_counts() -> None:
    assert not same_meaning(meaning(says("done")), meaning(says("done\n")))


def test_reasoning_that_is_not_echoed_equals_any_but_other_reasoning_differs() -> None:
    held = says("x", reasoning="because")
    assert same_meaning(meaning(held), meaning(says("x")))
    assert same_meaning(meaning(held), meaning(says("x", reasoning="because")))
    assert not same_meaning(meaning(held), meaning(says("x", reasoning="therefore")))
    assert difference(parts_of(held), parts_of(says("x", reasoning="therefore"))) == "reasoning"
    assert not same_meaning(meaning(says("x")), meaning(says("x", reasoning="made up")))
    assert difference(parts_of(says("x")), parts_of(says("x", reasoning="made up"))) == "reasoning"


def test_a_run_of_messages_is_held_where_each_means_the_same() -> None:
    run = [user("u"), says("a", reasoning="why"), user("v")]
    held = MessageHasher().conversation(run).run()
    assert len(held) == 3
    for before in ([], [user("x")], [says("s", reasoning="r"), user("x")]):
        for middle, fits in ((run[1], True), (says("a"), True), (says("a", reasoning="no"), False)):
            reported = MessageHasher().conversation([*before, run[0], middle, run[2], user("more")])
            assert reported.contains(held, len(before)) is fits
            assert not reported.contains(held, len(before) + 1)
            assert reported.rest(len(before)).contains(held, 0) is fits
    reported = MessageHasher().conversation([user("u"), says("a", reasoning="why")])
    assert not reported.contains(held, 0)
    plain = MessageHasher().conversation([says("a")]).run()
    assert not MessageHasher().conversation([says("a", reasoning="made up")]).contains(plain, 0)


def test_differences_are_named_in_wire_order() -> None:
    def named(got: Message) -> str:
        return difference(parts_of(says("x", call("1", '{"a":1}'))), parts_of(got))

    assert named(says("y", call("1", '{"a":2}'))) == "text"
    assert named(says("x", call("1", '{"a":2}', name="read"))) == "tool name"
    assert named(says("x")) == "tool name"
    assert named(says("x", call("1", '{"a":2}'))) == "arguments"
    assert named(says("x", call("9", '{"a": 1}'))) == ""


def test_what_is_remembered_of_spellings_changes_no_meaning() -> None:
    reader = MessageHasher()
    spelled = [says("t", call(str(i), text)) for i, text in enumerate(('{"a":1,"b":2}', '{"b":2, "a":1.0}'))]
    for _ in range(2):
        assert len({reader.meaning(message) for message in spelled}) == 1
    apart = [
        says("t", call("1", '{"a":1}'), call("2", "{}")),
        says("t", call("1", "{}"), call("2", '{"a":1}')),
        says("", call("1", '{"a":1}'), call("2", "{}")),
        says("t", call("1", '{"a":1}')),
        says("t", call("1", '{"a":1}', name="shell2"), call("2", "{}")),
        says("t"),
        says("1 t"),
        user("t"),
        system("t"),
        answer("x", "t"),
    ]
    found = {reader.meaning(m) if m.role == "assistant" else meanings([m])[0] for m in apart}
    assert len(found) == len(apart)


def test_tool_results_are_tied_to_calls_by_position_not_by_id() -> None:
    def keys(first: str, second: str, order: tuple[str, str]) -> list[MessageDigest]:
        said = says("", call(first), call(second))
        return meanings([user("u"), said, *(answer(i, "same") for i in order)])

    assert keys("a", "b", ("a", "b")) == keys("x", "y", ("x", "y"))
    assert keys("a", "b", ("a", "b")) != keys("a", "b", ("b", "a"))


def test_a_reused_call_id_belongs_to_the_latest_call() -> None:
    once = [says("", call("a")), answer("a"), says("", call("a")), answer("a")]
    keys = meanings(once)
    assert keys[1] == keys[3]


def test_the_root_key_covers_family_system_and_tools() -> None:
    other = ToolSpec(name="shell", description="run!", parameters=SHELL.parameters)
    keys = {
        root_key("f", system_digest([system("a")]), tools_digest([SHELL])),
        root_key("g", system_digest([system("a")]), tools_digest([SHELL])),
        root_key("f", system_digest([system("b")]), tools_digest([SHELL])),
        root_key("f", system_digest([system("a"), system("")]), tools_digest([SHELL])),
        root_key("f", system_digest([system("a")]), tools_digest([])),
        root_key("f", system_digest([system("a")]), tools_digest([other])),
        root_key("f", system_digest([system("a")]), tools_digest([SHELL, other])),
        root_key("f", system_digest([system("a")]), tools_digest([other, SHELL])),
    }
    assert len(keys) == 8


def test_digests_do_not_run_parts_together() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert wire_digest([user("a"), user("b")]) != wire_digest([user("ab")])
    assert leading_system([system("a"), system("b"), user("u"), system("c")]) == 2
    assert leading_system([system("a")]) == 1


EDIT = ToolSpec(
    name="edit",
    description="",
    parameters='{"properties":{"path":{"type":"string"},"all":{"default":false},"n":{"default":2.0},"x":{"default":null}}}',
)


@pytest.mark.case(21)
def test_an_argument_at_the_default_that_its_tool_declares_counts_as_absent() -> None:
    reader = MessageHasher(declared_defaults([SHELL, EDIT]))

    def meaning_of(arguments: str, name: str = "edit") -> MessageDigest:
        return reader.meaning(says("", call("c", arguments, name=name)))

    plain = meaning_of('{"path":"a"}')
    for filled in (
        '{"all":false,"path":"a"}',
        '{"path":"a","n":2}',
        '{"x":null,"n":2.00,"path":"a","all":false}',
    ):
        assert meaning_of(filled) == plain
        assert meaning_of(filled, name="shell") != meaning_of('{"path":"a"}', name="shell")
    for other in (
        '{"path":"a","all":true}',
        '{"path":"a","all":0}',
        '{"path":"a","n":"2"}',
        '{"path":"a","y":null}',
    ):
        assert meaning_of(other) != plain


@pytest.mark.parametrize(
    "schema", ["", "[]", "{", '{"properties":[]}', '{"properties":{"a":1}}', "[" * 5000, "null"]
)
def test_a_schema_that_declares_nothing_readable_has_no_defaults(schema: str) -> None:
    assert declared_defaults([ToolSpec(name="t", description="", parameters=schema)]) == {}
