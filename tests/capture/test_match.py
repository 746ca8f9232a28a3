from __future__ import annotations

import pytest
from capture_lab import SHELL, answer, call, says, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.capture.drift import difference
from whet.capture.match import (
    canonical_arguments,
    digest,
    leading_system,
    message_key,
    message_keys,
    root_key,
    same,
    wire_digest,
)
from whet.types import ToolSpec


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
    ],
)
def test_arguments_of_another_value_differ(sampled: str, echoed: str) -> None:
    assert canonical_arguments(sampled) != canonical_arguments(echoed)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '"\ud800"', "\x00", '"\\ud800"']
)
def test_hostile_arguments_have_a_key(text: str) -> None:
    assert same(message_key(says("", call("c", text))), message_key(says("", call("c", text))))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_re_dumping_never_changes_the_key(value: dict[str, object], ascii_only: bool) -> None:
    import json

    echoed = json.dumps(dict(reversed(value.items())), ensure_ascii=ascii_only, indent=2)
    assert canonical_arguments(json.dumps(value)) == canonical_arguments(echoed)


def test_surrounding_whitespace_of_text_counts() -> None:
    assert not same(message_key(says("done")), message_key(says("done\n")))


def test_reasoning_that_is_not_echoed_equals_any_but_other_reasoning_differs() -> None:
    held = message_key(says("x", reasoning="because"))
    assert same(held, message_key(says("x")))
    assert same(held, message_key(says("x", reasoning="because")))
    assert difference(held, message_key(says("x", reasoning="therefore"))) == "reasoning"
    assert difference(message_key(says("x")), message_key(says("x", reasoning="made up"))) == "reasoning"


def test_differences_are_named_in_wire_order() -> None:
    held = message_key(says("x", call("1", '{"a":1}')))
    assert difference(held, message_key(says("y", call("1", '{"a":2}')))) == "text"
    assert difference(held, message_key(says("x", call("1", '{"a":2}', name="read")))) == "tool name"
    assert difference(held, message_key(says("x"))) == "tool name"
    assert difference(held, message_key(says("x", call("1", '{"a":2}')))) == "arguments"
    assert difference(held, message_key(says("x", call("9", '{"a": 1}')))) == ""


def test_tool_results_are_tied_to_calls_by_position_not_by_id() -> None:
    def keys(first: str, second: str, order: tuple[str, str]) -> list[object]:
        said = says("", call(first), call(second))
        return list(message_keys([user("u"), said, *(answer(i, "same") for i in order)]))

    assert keys("a", "b", ("a", "b")) == keys("x", "y", ("x", "y"))
    assert keys("a", "b", ("a", "b")) != keys("a", "b", ("b", "a"))


def test_a_reused_call_id_belongs_to_the_latest_call() -> None:
    once = [says("", call("a")), answer("a"), says("", call("a")), answer("a")]
    keys = message_keys(once)
    assert keys[1] == keys[3]


def test_the_root_key_covers_family_system_and_tools() -> None:
    other = ToolSpec(name="shell", description="run!", parameters=SHELL.parameters)
    keys = {
        root_key("f", [system("a")], [SHELL]),
        root_key("g", [system("a")], [SHELL]),
        root_key("f", [system("b")], [SHELL]),
        root_key("f", [system("a"), system("")], [SHELL]),
        root_key("f", [system("a")], []),
        root_key("f", [system("a")], [other]),
        root_key("f", [system("a")], [SHELL, other]),
        root_key("f", [system("a")], [other, SHELL]),
    }
    assert len(keys) == 8


def test_digests_do_not_run_parts_together() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert wire_digest([user("a"), user("b")]) != wire_digest([user("ab")])
    assert leading_system([system("a"), system("b"), user("u"), system("c")]) == 2
    assert leading_system([system("a")]) == 1
