"""Calls of every known family are read whole or not at all; the package's own parsers are the oracle."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
from known_lab import FAMILIES, renderer_of
from renderers.base import ToolCallParseStatus

from insitu.types import Message, ToolCall, ToolSpec
from insitu_bridges.renderers_adapter import AdaptedRenderer

pytestmark = pytest.mark.slow

TOOLS = (
    ToolSpec(
        name="edit",
        description="Edit.",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "new": {"type": "string"},
                    "count": {"type": "integer"},
                    "deep": {"type": "object"},
                    "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                },
            }
        ),
    ),
)
ARGUMENTS = (
    {"path": "a.py", "new": "    def f():\n        return '<b>'\n", "count": 3},
    {"path": "true", "deep": {"k": [1, None, "é🙂"]}, "any": "seven"},
    {},
)
OPENERS = ("<tool_call>", "<|tool_call_begin|>", "<\uff5ctool\u2581call\u2581begin\uff5c>")
CLOSERS = ("</tool_call>", "<|tool_call_end|>", "<\uff5ctool\u2581call\u2581end\uff5c>")
KNOWN_KEYS = {"path", "new", "count", "deep", "any"}


@pytest.fixture(params=FAMILIES)
def chat_renderer(request: pytest.FixtureRequest) -> AdaptedRenderer:
    return renderer_of(request.param, request.config.cache.mkdir("insitu"))


def calls_of(chat_renderer: AdaptedRenderer, count: int = 2) -> tuple[ToolCall, ...]:
    made = [ToolCall(id="", name="edit", arguments=json.dumps(a)) for a in ARGUMENTS]
    return tuple(made[: count if chat_renderer.caps.parallel_calls else 1])


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.case(13)
def test_arguments_come_back_as_they_were_meant(
    chat_renderer: AdaptedRenderer, arguments: dict[str, object]
) -> None:
    call = ToolCall(id="", name="edit", arguments=json.dumps(arguments))
    parsed = chat_renderer.parse(
        chat_renderer.render_reply(Message(role="assistant", tool_calls=(call,))), TOOLS
    )
    assert [(c.name, json.loads(c.arguments)) for c in parsed.calls] == [("edit", arguments)]
    assert not parsed.malformed


@pytest.mark.parametrize(
    ("said", "calls", "malformed"),
    [
        ('{"type": "function", "name": "edit", "parameters": {"path": "a"}}', 1, False),
        ('{"parameters": {"path": "a"}, "name": "edit", "type": "function"}', 1, False),
        ('<|python_tag|>{"name": "edit", "parameters": {"path": "a"}}<|eom_id|>', 1, False),
        (
            '<|python_tag|>\n{"type": "function", "name": "edit", "parameters": {"path": "a"}}<|eot_id|>',
            1,
            False,
        ),
        ('{"name": "edit", "arguments": {"path": "a"}}', 1, False),
        ('{"name": "edit", "arguments": {"path": "a"}, "parameters": {}}', 0, True),
        ('{"type": "function", "name": "edit"}', 0, True),
        ('{"type": "function", "function": "edit", "parameters": {}}', 0, True),
        ('{"name": "edit", "parameters": {}}; {"name": "edit", "parameters": {}}', 0, True),
        ('<|python_tag|>edit.call(path="a")<|eom_id|>', 0, True),
        ('Look. <|python_tag|>{"name": "edit", "parameters": {"path": "a"}}<|eom_id|>', 0, True),
        ('{"type": "module"}', 0, False),
        ('see {"name": "edit", "parameters": {}}', 0, False),
    ],
)
def test_llama_writes_its_calls_in_several_ways(
    request: pytest.FixtureRequest, said: str, calls: int, malformed: bool
) -> None:
    chat_renderer = renderer_of("llama-3", request.config.cache.mkdir("insitu"))
    parsed = chat_renderer.parse(chat_renderer.codec.encode(said), TOOLS)
    assert [(c.name, c.arguments) for c in parsed.calls] == [("edit", '{"path": "a"}')] * calls
    assert parsed.malformed is malformed
    assert bool(parsed.text) is not bool(calls)


@pytest.mark.case(6)
def test_a_reply_cut_anywhere_has_whole_calls_only(chat_renderer: AdaptedRenderer) -> None:
    ids = chat_renderer.render_reply(Message(role="assistant", tool_calls=calls_of(chat_renderer)))
    whole = [(c.name, c.arguments) for c in chat_renderer.parse(ids, TOOLS).calls]
    assert len(whole) == len(calls_of(chat_renderer))
    seen = set()
    for cut in range(len(ids)):
        parsed = chat_renderer.parse(ids[:cut], TOOLS)
        found = [(c.name, c.arguments) for c in parsed.calls]
        assert found == whole[: len(found)]
        seen.add((len(found), parsed.malformed))
    assert (0, True) in seen, "cut inside the first call"
    assert len(whole) == 1 or {(1, True), (1, False)} <= seen


def test_what_counts_as_a_call_counts_in_the_package_too(chat_renderer: AdaptedRenderer) -> None:
    """Ours are stricter: damaged replies give a call only where the package finds the same one."""
    rng = random.Random(7)
    base = chat_renderer.render_reply(Message(role="assistant", tool_calls=calls_of(chat_renderer)))
    pool = [*base.tolist(), *sorted(chat_renderer.codec.names)]
    shown = [chat_renderer.inputs.tool(t) for t in TOOLS]
    counted = 0
    for _ in range(300):
        ids = base.copy()
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(ids))
            what = rng.random()
            if what < 0.4:
                ids[at] = rng.choice(pool)
            elif what < 0.7:
                ids = np.delete(ids, at)
            else:
                ids = np.insert(ids, at, rng.choice(pool))
        # The engine ends a reply at its first stop token.
        ends = [i for i, token in enumerate(ids) if int(token) in chat_renderer.stop_ids]
        ids = ids[: ends[0] + 1] if ends else ids
        prompt = chat_renderer.generation_prompt().tolist()
        parsed = chat_renderer.parse(ids, TOOLS)
        theirs = chat_renderer.renderer.parse_response(ids.tolist(), tools=shown, prompt_ids=prompt)
        accepted = [(c.name, c.arguments) for c in theirs.tool_calls if c.status == ToolCallParseStatus.OK]
        if _opens_twice(chat_renderer, ids):
            continue  # an opener in an open call ends it; the package reads on and mixes the two
        for call in parsed.calls:
            meant = json.loads(call.arguments)
            if call.name != "edit" or not set(meant) <= KNOWN_KEYS:
                continue  # an unknown tool or parameter is for the agent to refuse
            if isinstance(meant.get("count"), str) or isinstance(meant.get("deep"), str):
                continue  # so is a value of another type
            if "</parameter>" in call.arguments:
                continue  # text for us: nothing that may follow a parameter stands behind it
            counted += 1
            assert any(_alike(meant, arguments) for _, arguments in accepted), (
                call,
                chat_renderer.decode(ids),
            )
    assert counted > 20


def _opens_twice(chat_renderer: AdaptedRenderer, ids: np.ndarray) -> bool:
    names = [chat_renderer.codec.names[int(ids[i])] for i in chat_renderer.codec.control_positions(ids)]
    marks = [n in OPENERS for n in names if n in OPENERS or n in CLOSERS]
    return any(a and b for a, b in itertools.pairwise(marks))


def _alike(meant: object, arguments: object) -> bool:
    """Equal but for white space at the ends of strings, which the package takes away."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)

    def bare(value: object) -> object:
        if isinstance(value, dict):
            return {k.strip(): bare(v) for k, v in value.items()}
        return value.strip() if isinstance(value, str) else value

    return bare(arguments) == bare(meant)


def test_marker_text_in_ordinary_tokens_is_no_call(chat_renderer: AdaptedRenderer) -> None:
    if chat_renderer.caps.tool_format == "llama":
        return  # its calls have no markers: the whole reply is the call
    ids = chat_renderer.render_reply(
        Message(role="assistant", text="Look.", tool_calls=calls_of(chat_renderer, 1))
    )
    typed = chat_renderer.codec.encode_content(chat_renderer.decode(ids[:-1]))
    scaffold = "</think>" if chat_renderer.in_reasoning else ""
    parsed = chat_renderer.parse(
        np.concatenate([chat_renderer.codec.encode(scaffold), typed, ids[-1:]]), TOOLS
    )
    assert parsed.calls == ()
    assert not parsed.malformed
    assert parsed.text.strip() == chat_renderer.decode(ids[:-1]).strip()


@pytest.mark.case(8)
def test_end_tokens_alone_and_nothing_at_all(chat_renderer: AdaptedRenderer) -> None:
    for ids in [[], *([stop] for stop in sorted(chat_renderer.stop_ids))]:
        parsed = chat_renderer.parse(np.array(ids, dtype=np.int32), TOOLS)
        assert (parsed.text, parsed.calls, parsed.malformed) == ("", (), False)


@pytest.mark.case(2)
def test_broken_bytes_at_the_end_do_not_break_the_reply(chat_renderer: AdaptedRenderer) -> None:
    half = chat_renderer.codec.encode_content("\U000f0000")[:-1]
    scaffold = chat_renderer.codec.encode("</think>" if chat_renderer.in_reasoning else "")
    parsed = chat_renderer.parse(
        np.concatenate([scaffold, chat_renderer.codec.encode_content("ok "), half]), TOOLS
    )
    assert parsed.text.startswith("ok")
    parsed.text.encode()


def test_values_without_quotes_follow_the_schema(request: pytest.FixtureRequest) -> None:
    chat_renderer = renderer_of("qwen3.5", request.config.cache.mkdir("insitu"))

    def read(parameters: str, tools: tuple[ToolSpec, ...] = TOOLS) -> object:
        text = f"</think>\n\n<tool_call>\n<function=edit>\n{parameters}</function>\n</tool_call><|im_end|>"
        parsed = chat_renderer.parse(chat_renderer.codec.encode(text), tools)
        return json.loads(parsed.calls[0].arguments) if parsed.calls else parsed.malformed

    def one(name: str, value: str) -> str:
        return f"<parameter={name}>\n{value}\n</parameter>\n"

    assert read(one("path", "12")) == {"path": "12"}
    assert read(one("path", "12"), ()) == {"path": 12}
    assert read(one("count", "12")) == {"count": 12}
    assert read(one("count", "many")) == {"count": "many"}
    assert read(one("any", "7")) == {"any": 7}
    assert read(one("any", "seven")) == {"any": "seven"}
    assert read(one("new", "\n  x\n\n")) == {"new": "\n  x\n\n"}
    assert read(one("path", "a") + one("path", "b")) is True
    assert read(one("path", "a").replace("</parameter>", "")) is True
    assert read("text " + one("path", "a")) is True
    assert read(one("deep", '{"a": 1}, "b": {')) == {"deep": '{"a": 1}, "b": {'}


def test_kimi_results_name_the_call_as_the_model_did(request: pytest.FixtureRequest) -> None:
    chat_renderer = renderer_of("kimi-k2", request.config.cache.mkdir("insitu"))
    calls = tuple(ToolCall(id=f"functions.edit:{n}", name="edit", arguments="{}") for n in (7, 8))
    said = chat_renderer.render_reply(Message(role="assistant", tool_calls=calls))
    assert [call.id for call in chat_renderer.parse(said).calls] == ["functions.edit:7", "functions.edit:8"]
    for ids, headings in [
        (["functions.edit:7", "functions.edit:8"], [7, 8]),
        (["functions.edit:8", "functions.edit:7"], [8, 7]),
        (["a", "b"], [7, 8]),
        (["functions.edit:7", "b"], [7, 8]),
        (["functions.edit:8", "b"], [8, 7]),
    ]:
        results = [Message(role="tool", text="done", tool_call_id=id) for id in ids]
        shown = chat_renderer.decode(chat_renderer.join(said, "stop", results))
        assert re.findall(r"## Return of functions\.edit:(\d)\ndone", shown) == [str(n) for n in headings]


@pytest.mark.parametrize(
    "ids", [("call_9f2c", "toolu_01-x"), ("", ""), ("functions.other:3", "é.x"), ("1:1", "x" * 99)]
)
def test_calls_of_another_origin_are_named_alike_in_call_and_result(
    request: pytest.FixtureRequest, ids: tuple[str, str]
) -> None:
    chat_renderer = renderer_of("kimi-k2", request.config.cache.mkdir("insitu"))
    run = [Message(role="user", text="Go.")]
    for id, name in zip(ids, ("look", "edit"), strict=True):
        call = ToolCall(id=id, name=name, arguments="{}")
        run += [
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", text="ok", tool_call_id=id),
        ]
    shown = chat_renderer.decode(chat_renderer.append(run))
    assert re.findall(r"<\|tool_call_begin\|>([^<]*)", shown) == ["functions.look:0", "functions.edit:1"]
    assert re.findall(r"## Return of ([^\n]*)", shown) == ["functions.look:0", "functions.edit:1"]
