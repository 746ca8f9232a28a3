"""An assistant turn means after the round trip through an agent what it meant when it was sent.

Every format, whole and streamed; spelt again, split and merged as the measured agents do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.capture.digests import MessageHasher, same_meaning
from insitu.gateway.dialects.base import Envelope, ParsedBody
from insitu.gateway.server import DIALECTS
from insitu.types import Message, ModelRequest, Reply, ToolCall

NAMES = {
    "ns__spawn": '{"type":"function","name":"spawn","namespace":"ns"}',
    "patch": '{"type":"custom","name":"patch","namespace":""}',
}
ENVELOPE = Envelope(
    id="0123456789abcdef01234567",
    created=1,
    model="policy",
    body=ParsedBody(request=ModelRequest(messages=()), names=NAMES),
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)


@st.composite
def spelled(draw: st.DrawFn) -> str:
    """Arguments in one of many spellings."""
    value = draw(OBJECTS)
    return json.dumps(
        value,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, None, 1])),
        separators=draw(st.sampled_from([(",", ":"), (" , ", "\n: ")])),
    )


@st.composite
def calls(draw: st.DrawFn) -> ToolCall:
    name = draw(st.sampled_from(["read", "ns__spawn", "patch"]))
    arguments = json.dumps({"input": draw(TEXT)}) if name == "patch" else draw(spelled())
    return ToolCall(id="", name=name, arguments=arguments)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    drawn = draw(st.lists(calls(), max_size=3))
    return Reply(
        text=draw(TEXT),
        reasoning=draw(TEXT),
        tool_calls=tuple(
            ToolCall(id=f"call_{i}", name=c.name, arguments=c.arguments) for i, c in enumerate(drawn)
        ),
    )


Respell = Callable[[str], list[str]]
"""How an agent sends a text back: as pieces."""


def halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def redumped(value: Any) -> Any:
    """Keys in another order."""
    return dict(reversed(value.items())) if isinstance(value, dict) else value


def chat_echo(body: dict[str, Any], pieces: Respell, keep: bool) -> dict[str, Any]:
    message = body["choices"][0]["message"]
    message["content"] = [{"type": "text", "text": t} for t in pieces(message["content"] or "")]
    for call in message.get("tool_calls", []):
        function = call["function"]
        function["arguments"] = json.dumps(redumped(json.loads(function["arguments"])))
    if not keep:
        message.pop("reasoning_content", None)
    return {"messages": [{"role": "user", "content": "x"}, message, {"role": "user", "content": "y"}]}


def anthropic_echo(body: dict[str, Any], pieces: Respell, keep: bool) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for block in body["content"]:
        if block["type"] == "text":
            blocks += [{"type": "text", "text": t} for t in pieces(block["text"])]
        elif block["type"] == "tool_use":
            blocks.append(
                {**block, "input": redumped(block["input"]), "cache_control": {"type": "ephemeral"}}
            )
        elif keep:
            blocks.append(block)
    cut = len(blocks) // 2
    said = [{"role": "assistant", "content": part} for part in (blocks[:cut], blocks[cut:])]
    return {"messages": [{"role": "user", "content": "x"}, *said, {"role": "user", "content": "y"}]}


def responses_echo(body: dict[str, Any], pieces: Respell, keep: bool) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for item in body["output"]:
        if item["type"] == "message":
            parts = [{"type": "output_text", "text": t} for t in pieces(item["content"][0]["text"])]
            items.append({"type": "message", "role": "assistant", "content": parts})
        elif item["type"] != "reasoning" or keep:
            items.append({key: value for key, value in item.items() if key not in ("id", "status")})
    return {"input": [*items, {"role": "user", "content": "y"}]}


def gemini_echo(body: dict[str, Any], pieces: Respell, keep: bool) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in body["candidates"][0]["content"]["parts"]:
        if part.get("thought"):
            parts += [part] if keep else []
        elif "text" in part:
            parts += [{**part, "text": t} for t in pieces(part["text"])]
        else:
            call = part["functionCall"]
            parts.append({"functionCall": {**call, "args": redumped(call["args"])}})
    user = {"role": "user", "parts": [{"text": "x"}]}
    said = [{"role": "model", "parts": [part]} for part in parts]
    return {"contents": [user, *said, user]}


ECHOES = {"chat": chat_echo, "anthropic": anthropic_echo, "responses": responses_echo, "gemini": gemini_echo}
ACTION = {"gemini": "models/m:generateContent"}


def echoed(name: str, reply: Reply, pieces: Respell, keep: bool) -> list[Message]:
    """The messages of the request in which an agent sends `reply` back."""
    dialect = DIALECTS[name]
    body = orjson.loads(orjson.dumps(dialect.reply(reply, ENVELOPE)))
    again = orjson.loads(json.dumps(ECHOES[name](body, pieces, keep)))
    return list(dialect.parse(again, ACTION.get(name, "")).request.messages)


def as_message(reply: Reply) -> Message:
    return Message(role="assistant", text=reply.text, reasoning=reply.reasoning, tool_calls=reply.tool_calls)


@pytest.mark.case(18, 22)
@pytest.mark.parametrize("keep", [True, False], ids=["reasoning", "no reasoning"])
@pytest.mark.parametrize("pieces", [lambda text: [text], halves], ids=["whole", "split"])
@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=40)
@given(reply=replies())
def test_an_echo_means_what_was_sent(name: str, pieces: Respell, keep: bool, reply: Reply) -> None:
    first, *said, last = echoed(name, reply, pieces, keep)
    assert (first.role, last.role) == ("user", "user")
    if not said:  # a turn without content leaves nothing that an agent could send back
        assert (reply.text, reply.tool_calls) == ("", ())
        assert not (keep and reply.reasoning)
        return
    (message,) = said
    reader = MessageHasher()
    held, got = reader.meaning(as_message(reply)), reader.meaning(message)
    assert same_meaning(held, got)
    assert bool(got.reasoning) == (keep and bool(reply.reasoning))
    assert [call.id for call in message.tool_calls] == [call.id for call in reply.tool_calls]


ODD = {
    "python words": "{'a': False}",
    "half": '{"a": [1,',
    "no object": "[1, 2]",
    "text": "ls -l",
    "empty": "",
    "null": "null",
    "wrapped": '{"unparsed_arguments": "{"}',
    "deep": '{"a":' + "[" * 200 + "]" * 200 + "}",
    "surrogate": '{"a": "\\ud800"}',
}


@pytest.mark.case(13, 20)
@pytest.mark.parametrize("arguments", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", DIALECTS)
def test_arguments_that_are_no_object_come_back_as_they_were(name: str, arguments: str) -> None:
    """Formats that want an object wrap them: the agent can complain, and the echo is still the turn."""
    reply = Reply(tool_calls=(ToolCall(id="call_0", name="read", arguments=arguments),))
    dialect = DIALECTS[name]
    body = orjson.loads(orjson.dumps(dialect.reply(reply, ENVELOPE)))
    echo: dict[str, Any]
    if name == "chat":
        echo = {"messages": [{"role": "user", "content": "x"}, body["choices"][0]["message"]]}
    elif name == "anthropic":
        said = {"role": "assistant", "content": body["content"]}
        echo = {"messages": [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]}
    elif name == "responses":
        echo = {"input": [{"role": "user", "content": "x"}, *body["output"]]}
    else:
        echo = {"contents": [{"parts": [{"text": "x"}]}, body["candidates"][0]["content"]]}
    request = dialect.parse(orjson.loads(orjson.dumps(echo)), ACTION.get(name, "")).request
    (call,) = request.messages[1].tool_calls
    reader = MessageHasher()
    assert same_meaning(reader.meaning(as_message(reply)), reader.meaning(request.messages[1])), call


@pytest.mark.case(13, 19)
@pytest.mark.parametrize(
    ("arguments", "again"),
    [
        ('{"a": 1.50, "b": 1e2}', '{"b":100,"a":1.5}'),
        ('{"a": 9223372036854775807}', '{"a":9223372036854775807}'),
        ('{"a": 18446744073709551615}', '{"a":18446744073709551615}'),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ('{"p": "\\u00e9\\/"}', '{"p":"é/"}'),
    ],
)
@pytest.mark.parametrize("name", ["anthropic", "gemini"])
def test_a_value_spelt_anew_is_the_same_object(name: str, arguments: str, again: str) -> None:
    use = {"type": "tool_use", "id": "c", "name": "read", "input": orjson.loads(again)}
    user = {"role": "user", "content": "x"}
    bodies: dict[str, dict[str, Any]] = {
        "anthropic": {"messages": [user, {"role": "assistant", "content": [use]}, user]},
        "gemini": {
            "contents": [
                {"parts": [{"text": "x"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "read", "args": orjson.loads(again)}}]},
            ]
        },
    }
    message = DIALECTS[name].parse(bodies[name], ACTION.get(name, "")).request.messages[1]
    sent = Message(role="assistant", tool_calls=(ToolCall(id="c", name="read", arguments=arguments),))
    assert same_meaning(MessageHasher().meaning(sent), MessageHasher().meaning(message))


@pytest.mark.case(13)
def test_chat_takes_arguments_as_an_object_too() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": {"a": 1}}}
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}
    (_, message) = DIALECTS["chat"].parse(body, "").request.messages
    assert message.tool_calls[0].arguments == '{"a":1}'


@pytest.mark.case(25)
@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_no_content_is_no_content_however_it_is_written(content: Any) -> None:
    user = {"role": "user", "content": "x"}
    body: dict[str, Any] = {"messages": [user, {"role": "assistant", "content": content}, user]}
    assert [m.text for m in DIALECTS["chat"].parse(body, "").request.messages] == ["x", "", "x"]
    assert [m.text for m in DIALECTS["anthropic"].parse(body, "").request.messages] == ["x", "", "x"]
    item = {"type": "message", "role": "assistant", "content": content}
    if content:
        item["content"] = [{"type": "output_text", "text": ""}]
    items = {"input": [{"role": "user", "content": "x"}, item]}
    assert [m.text for m in DIALECTS["responses"].parse(items, "").request.messages] == ["x", ""]


@pytest.mark.case(23)
@pytest.mark.parametrize("name", DIALECTS)
def test_a_turn_left_out_is_not_made_up(name: str) -> None:
    """Two messages of the user beside each other stay two, so the forest sees what is missing."""
    texts = ("Fix f.", "Format error: no call.")
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": t} for t in texts]},
        "anthropic": {"messages": [{"role": "user", "content": t} for t in texts]},
        "responses": {"input": [{"role": "user", "content": t} for t in texts]},
        "gemini": {"contents": [{"role": "user", "parts": [{"text": t}]} for t in texts]},
    }
    request = DIALECTS[name].parse(bodies[name], ACTION.get(name, "")).request
    assert [(m.role, m.text) for m in request.messages] == [("user", t) for t in texts]


@pytest.mark.case(13)
@pytest.mark.parametrize("number", ["9" * 30, "-" + "9" * 30, "1e400", "1e-400"])
@pytest.mark.parametrize("name", ["anthropic", "gemini"])
def test_numbers_beyond_all_bounds_are_carried(name: str, number: str) -> None:
    """With either reader of JSON: the one that keeps large integers and the one that rounds them."""
    reply = Reply(tool_calls=(ToolCall(id="c", name="read", arguments=f'{{"a": {number}}}'),))
    raw = orjson.dumps(DIALECTS[name].reply(reply, ENVELOPE))
    assert number in raw.decode()
    for body in (json.loads(raw), orjson.loads(raw)):
        echo = ECHOES[name](body, lambda text: [text], True)
        (_, said, _) = DIALECTS[name].parse(echo, ACTION.get(name, "")).request.messages
        assert json.loads(said.tool_calls[0].arguments).keys() == {"a"}
