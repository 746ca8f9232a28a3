"""Replies are read by ids: control ids make calls and reasoning, text never does."""

from __future__ import annotations

import numpy as np
import pytest
from render_families import tokenizer_json

from insitu.chat.codec import Codec
from insitu.chat.parse import read_call
from insitu.chat.renderer import ParsedCall, ParsedReply
from insitu.chat.tool_formats import parse_hermes

CODEC = Codec(tokenizer_json())
STOP = frozenset({CODEC.control["<|im_end|>"], CODEC.control["<|im_start|>"]})


def parse(scaffold: str, in_reasoning: bool = False) -> ParsedReply:
    return parse_hermes(CODEC, CODEC.encode(scaffold), STOP, in_reasoning)


GOOD = '<tool_call>\n{"name": "read", "arguments": {"path":  "a"}}\n</tool_call>'


def test_text_reasoning_and_calls() -> None:
    reply = parse(f"<think>\nhm\n</think>\n\nI look.\n{GOOD}\n{GOOD}<|im_end|>")
    call = ParsedCall(name="read", arguments='{"path":  "a"}')
    assert reply == ParsedReply(text="I look.", reasoning="hm", calls=(call, call))


def test_plain_text_is_kept_with_its_white_space() -> None:
    assert parse("  \n\nx \n\n<|im_end|>") == ParsedReply(text="  \n\nx \n\n")


def test_marker_text_in_ordinary_tokens_is_text() -> None:
    reply = parse(CODEC.shield(GOOD + "<think>") + "<|im_end|>")
    assert reply == ParsedReply(text=GOOD + "<think>")


def test_no_stop_token_and_nothing_at_all() -> None:
    assert parse("abc").text == "abc"
    assert parse("") == ParsedReply(text="")
    assert parse("<|im_end|>") == ParsedReply(text="")


def test_empty_reasoning_leaves_no_line_breaks() -> None:
    assert parse("<think>\n\n</think>\n\nok<|im_end|>") == ParsedReply(text="ok")


def test_reasoning_cut_off_and_reasoning_opened_by_the_prompt() -> None:
    assert parse("<think>\nso far") == ParsedReply(text="", reasoning="so far")
    assert parse("so far\n</think>\n\nok<|im_end|>", in_reasoning=True) == ParsedReply(
        text="ok", reasoning="so far"
    )


def test_calls_end_reasoning_that_was_never_closed() -> None:
    call = ParsedCall(name="read", arguments='{"path":  "a"}')
    for opened, in_reasoning in (("<think>\n", False), ("", True)):
        assert parse(f"{opened}I look.\n{GOOD}\n{GOOD}<|im_end|>", in_reasoning) == ParsedReply(
            text="", reasoning="I look.", calls=(call, call)
        )
        assert parse(f"{opened}{GOOD}\n", in_reasoning) == ParsedReply(text="", calls=(call,))


@pytest.mark.parametrize("rest", ["", " then more", "\n</think>\n\nok", f"\n{GOOD[:20]}", f" so\n{GOOD}"])
@pytest.mark.parametrize("inside", [GOOD, "<tool_call>read</tool_call>", "<tool_call>"])
def test_a_call_that_stays_in_reasoning_is_counted(inside: str, rest: str) -> None:
    if (inside, rest) == (GOOD, ""):
        return
    reply = parse(f"<think>\nI look.\n{inside}{rest}<|im_end|>")
    assert reply.malformed
    assert reply.calls == ()
    assert "<tool_call>" in reply.reasoning


@pytest.mark.parametrize("said", [GOOD.removeprefix("<tool_call>"), f"{GOOD}</tool_call>"])
def test_an_end_without_a_call_is_counted(said: str) -> None:
    reply = parse(f"{said}<|im_end|>")
    assert reply.malformed
    assert reply.text.endswith("</tool_call>")


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "read",
        "[]",
        '{"name": "read"}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "read", "arguments": "{}"}',
        '{"name": "read", "arguments": [1]}',
        '{"name": "read", "arguments": {}, "id": 3}',
        '{"name": "read", "arguments": {}, "type": "tool"}',
        '{"name": "read", "arguments": {},}',
        '{"name": "read", "arguments": {}',
        '{"name": "read", "arguments": {"a": NaN}}',
        '{"name": "read", "name": "write", "arguments": {}}',
        '{"name": "read", "arguments": {}} {}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "read", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    ],
)
def test_what_is_not_a_call_stays_text_and_is_malformed(inside: str) -> None:
    reply = parse(f"<tool_call>{inside}</tool_call><|im_end|>")
    assert reply == ParsedReply(text=f"<tool_call>{inside}</tool_call>", malformed=True)


def test_a_call_cut_off_is_malformed_and_a_whole_one_before_it_counts() -> None:
    reply = parse(f'{GOOD}\n<tool_call>\n{{"name": "re')
    assert reply.malformed
    assert len(reply.calls) == 1
    assert reply.text.endswith('<tool_call>\n{"name": "re')


def test_a_call_inside_a_call_ends_the_outer_one() -> None:
    reply = parse(f"<tool_call>{GOOD}<|im_end|>")
    assert reply.malformed
    assert len(reply.calls) == 1


def test_bytes_that_are_no_text_do_not_break_the_reply() -> None:
    half = CODEC.encode_content("🙂")[:1]
    reply = parse_hermes(CODEC, np.concatenate([CODEC.encode_content("a"), half]), STOP, False)
    assert reply == ParsedReply(text="a\ufffd")


def test_arguments_are_kept_as_sampled() -> None:
    raw = '{"b" : 1.50, "a":"\\u00e9\\/", "b": 2}'
    assert read_call(f' {{ "arguments": {raw} , "name":"x" }} ') == ParsedCall(name="x", arguments=raw)
