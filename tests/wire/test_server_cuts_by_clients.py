"""Streams of every format: each event is exactly of the provider's type, and cuts change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from anthropic._streaming import SSEDecoder as AnthropicDecoder
from anthropic.types import RawMessageStreamEvent
from google.genai import types
from google.genai._api_client import _iter_sse_lines
from openai._streaming import SSEDecoder as OpenAIDecoder
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from insitu.gateway.dialects.base import Dialect, Envelope, ParsedBody, WireError
from insitu.gateway.server import DIALECTS
from insitu.types import Finish, ModelRequest, Reply, ToolCall

ENVELOPE = Envelope(
    id="0123456789abcdef01234567",
    created=1_700_000_000,
    model="policy",
    body=ParsedBody(
        request=ModelRequest(messages=()),
        include_usage=True,
        names={
            "ns__spawn": '{"type":"function","name":"spawn","namespace":"ns"}',
            "patch": '{"type":"custom"}',
        },
    ),
)
LINES = "é 🙂\r\n\u2028\u2029\x85\n\n"


def reply(*, text: str = "", reasoning: str = "", calls: int = 0, finish: Finish = "stop") -> Reply:
    names = ("read", "ns__spawn", "patch")
    arguments = ('{"a":\n 1.50, "b": "' + "\u2028" + '"}', "{}", '{"input": "*** x\\n"}')
    return Reply(
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id=f"call_{i}", name=names[i], arguments=arguments[i]) for i in range(calls)
        ),
        finish=finish,
        prompt_tokens=11,
        sampled_tokens=7,
        pointer="cG9pbnRlcg",
    )


REPLIES = {
    "text": reply(text=LINES),
    "empty": reply(),
    "reasoning": reply(reasoning=LINES, text="So."),
    "calls": reply(reasoning="Hm.", text=LINES, calls=3),
    "only calls": reply(calls=2),
    "length": reply(text="So", finish="length"),
    "length in reasoning": reply(reasoning="So", finish="length"),
}


def pieces(raw: bytes, cut: int) -> Iterator[bytes]:
    yield raw[:cut]
    yield raw[cut:]


def sse_data(name: str, parts: Iterable[bytes]) -> list[str]:
    """The data of each event, as the official client of the format decodes it."""
    if name == "gemini":
        return [line.removeprefix("data: ") for line in _iter_sse_lines(iter(parts)) if line]
    decoder: Any = AnthropicDecoder() if name == "anthropic" else OpenAIDecoder()
    events = [event for event in decoder.iter_bytes(iter(parts)) if event.data]
    for event in events:
        if name in ("anthropic", "responses"):
            assert event.event == json.loads(event.data)["type"]
    return [event.data for event in events if event.data != "[DONE]"]


EVENT: dict[str, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletionChunk),
    "anthropic": TypeAdapter(RawMessageStreamEvent),
    "responses": TypeAdapter(ResponseStreamEvent),
    "gemini": TypeAdapter(types.GenerateContentResponse),
}


def stream(dialect: Dialect, said: Reply, waits: int) -> bytes:
    """A stream that had to wait `waits` times."""
    envelope = ENVELOPE
    raw = b""
    for _ in range(waits):
        raw += dialect.keep_alive(envelope)
        envelope = replace(envelope, kept_alive=envelope.kept_alive + 1)
    return raw + b"".join(dialect.events(said, envelope))


@pytest.mark.case(44, 48)
@pytest.mark.parametrize("waits", [0, 1, 3])
@pytest.mark.parametrize("said", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize("name", DIALECTS)
def test_every_event_is_exactly_of_its_type(name: str, said: Reply, waits: int) -> None:
    events = sse_data(name, [stream(DIALECTS[name], said, waits)])
    values = [json.loads(event) for event in events]
    for value in values:
        if value.get("type") != "ping":
            EVENT[name].validate_python(value)
    if name == "responses":
        assert [value["sequence_number"] for value in values] == list(range(len(values)))
        assert [value["type"] for value in values[: 2 + max(0, waits - 1)]] == [
            "response.created",
            *["response.in_progress"] * max(1, waits),
        ]


@pytest.mark.slow
@pytest.mark.case(48)
@pytest.mark.parametrize("kind", ["text", "calls"])
@pytest.mark.parametrize("name", DIALECTS)
def test_every_cut_gives_the_same_events(name: str, kind: str) -> None:
    raw = stream(DIALECTS[name], REPLIES[kind], 2)
    whole = sse_data(name, [raw])
    assert len(whole) >= 1
    for cut in range(1, len(raw)):
        assert sse_data(name, pieces(raw, cut)) == whole
    assert sse_data(name, (raw[i : i + 1] for i in range(len(raw)))) == whole


@pytest.mark.parametrize("name", DIALECTS)
def test_no_event_spans_lines(name: str) -> None:
    """One line of data per event: readers that know no more than that are many."""
    raw = stream(DIALECTS[name], REPLIES["calls"], 0)
    for frame in raw.decode().removesuffix("\n\n").split("\n\n"):
        lines = [line for line in frame.split("\n") if not line.startswith("event: ")]
        assert len(lines) == 1
        assert lines[0].startswith("data: ")
        assert "\r" not in lines[0]


@pytest.mark.case(48)
@pytest.mark.parametrize("cause", ["engine_failed", "context_length_exceeded", "session_closed"])
@pytest.mark.parametrize("name", DIALECTS)
def test_every_cut_of_a_failing_stream_gives_the_same_events(name: str, cause: Any) -> None:
    dialect = DIALECTS[name]
    error = WireError(cause, "No.", used=9, limit=5)
    raw = dialect.keep_alive(ENVELOPE) + dialect.error_event(error, replace(ENVELOPE, kept_alive=1))
    whole = sse_data(name, [raw])
    last = json.loads(whole[-1])
    if name == "responses":
        code = last["response"]["error"]["code"]
        assert code == {"engine_failed": "server_error", "session_closed": "invalid_prompt"}.get(cause, cause)
        if cause == "context_length_exceeded":  # what Codex looks for; not on the client's list of codes
            last["response"]["error"]["code"] = "server_error"
        EVENT[name].validate_python(last)
        assert last["response"]["error"]["message"]
    else:
        assert last["error"]["message"]
    for cut in range(1, len(raw)):
        assert sse_data(name, pieces(raw, cut)) == whole
