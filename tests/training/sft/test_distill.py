"""A provider's session, in the tokens of a renderer: what insitu itself would have held of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from insitu.chat.load import load_renderer
from insitu.config import WARM_START
from insitu.errors import RenderError
from insitu.gateway.dialects.base import Envelope
from insitu.gateway.server import DIALECTS
from insitu.gateway.text_log import TextCall, TextRecord, Usage, last_record
from insitu.types import Message, Reply, Segment, ToolCall
from insitu_train.sft.distill import distill_session
from insitu_train.sft.recorded_call import parse_recorded_call

FAMILY = load_renderer(WARM_START)
ENVELOPE = Envelope(id="ab", created=1, model="big")
ACTIONS = {
    "chat": "chat/completions",
    "anthropic": "messages",
    "responses": "responses",
    "gemini": "models/big:generateContent",
}
CALL = ToolCall(id="call_7", name="read", arguments='{"path":"a"}')
ACTS = Reply(text="I look.", tool_calls=(CALL,), prompt_tokens=3, sampled_tokens=4)
ENDS = Reply(text="It says\n\n x.", prompt_tokens=3, sampled_tokens=4)
CUT = replace(ENDS, finish="length")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def body(dialect: str, *, echoed: bool) -> dict[str, Any]:
    """The first request, or the second, in which the agent repeats the call and gives its result."""
    if dialect == "chat":
        call = {"id": CALL.id, "type": "function", "function": {"name": "read", "arguments": CALL.arguments}}
        said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        more = [said, {"role": "tool", "tool_call_id": CALL.id, "content": "x"}]
        tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it."}]
        return {"messages": messages + more * echoed, "tools": tools}
    if dialect == "anthropic":
        blocks = [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": CALL.id, "name": "read", "input": {"path": "a"}},
        ]
        result = [{"type": "tool_result", "tool_use_id": CALL.id, "content": "x"}]
        more = [{"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
        tools = [{"name": "read", "input_schema": SCHEMA}]
        messages = [{"role": "user", "content": "Fix it."}]
        return {"system": "Be brief.", "messages": messages + more * echoed, "tools": tools, "max_tokens": 9}
    if dialect == "responses":
        said = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        }
        call = {"type": "function_call", "call_id": CALL.id, "name": "read", "arguments": CALL.arguments}
        more = [said, call, {"type": "function_call_output", "call_id": CALL.id, "output": "x"}]
        tools = [{"type": "function", "name": "read", "parameters": SCHEMA}]
        asked = [{"role": "user", "content": "Fix it."}]
        given = asked + more if echoed else "Fix it."
        return {"instructions": "Be brief.", "input": given, "tools": tools, "store": True}
    parts = [{"text": "I look."}, {"functionCall": {"id": CALL.id, "name": "read", "args": {"path": "a"}}}]
    result = {"functionResponse": {"id": CALL.id, "name": "read", "response": {"output": "x"}}}
    more = [{"role": "model", "parts": parts}, {"role": "user", "parts": [result]}]
    contents = [{"role": "user", "parts": [{"text": "Fix it."}]}]
    return {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": contents + more * echoed,
        "tools": [{"functionDeclarations": [{"name": "read", "parametersJsonSchema": SCHEMA}]}],
    }


def answer(dialect: str, reply: Reply, *, streamed: bool) -> bytes:
    """As insitu's own dialects write it: official clients read it, in tests/wire."""
    speaker = DIALECTS[dialect]
    if streamed:
        return b"".join(speaker.events(reply, ENVELOPE))
    return orjson.dumps(speaker.reply(reply, ENVELOPE))


def line(dialect: str, turn: int, reply: Reply, *, streamed: bool, **changed: Any) -> TextCall:
    held: dict[str, Any] = {
        "turn": turn,
        "path": ACTIONS[dialect],
        "status": 200,
        "complete": True,
        "request": json.dumps(body(dialect, echoed=turn > 0)).encode(),
        "reply": answer(dialect, reply, streamed=streamed),
        "truncated": False,
        "usage": Usage(prompt_tokens=1, cached_tokens=0, sampled_tokens=1),
        "cost": 0.0,
        "ms": 1.0,
    }
    return TextCall(**{**held, **changed})


def recorded(path: Path, *calls: TextCall) -> Path:
    record = TextRecord(path, "train/1/0/0")
    for call in calls:
        asyncio.run(record.append(call))
    return path


def texts(segment: Segment) -> list[str]:
    """The imitated spans of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], segment.mask.astype(np.int8), [0]])))
    return [FAMILY.decode(segment.ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", list(ACTIONS))
def test_two_calls_become_one_row_with_both_replies_to_imitate(
    dialect: str, streamed: bool, tmp_path: Path
) -> None:
    calls = [line(dialect, 0, ACTS, streamed=streamed), line(dialect, 1, ENDS, streamed=streamed)]
    # They are recorded as they end; what began first comes first.
    segments = distill_session(recorded(tmp_path / "r.jsonl", *reversed(calls)), FAMILY, "train/1/0/0")
    assert [(s.kind, s.label) for s in segments] == [("demonstrated", "final")]
    said = [
        FAMILY.render_reply(Message(role="assistant", text="I look.", tool_calls=(CALL,))),
        FAMILY.render_reply(Message(role="assistant", text="It says\n\n x.")),
    ]
    assert texts(segments[0]) == [FAMILY.decode(ids) for ids in said]
    assert int(segments[0].mask.sum()) == sum(map(len, said))
    assert "Fix it." in FAMILY.decode(segments[0].ids)
    assert not segments[0].logprobs.any()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", list(ACTIONS))
def test_a_reply_that_the_provider_cut_is_not_imitated(dialect: str, streamed: bool, tmp_path: Path) -> None:
    calls = [line(dialect, 0, ACTS, streamed=streamed), line(dialect, 1, CUT, streamed=streamed)]
    (segment,) = distill_session(recorded(tmp_path / "r.jsonl", *calls), FAMILY, "train/1/0/0")
    assert len(texts(segment)) == 1


def test_what_the_agent_never_got_is_left_out(tmp_path: Path) -> None:
    lost = line("chat", 0, ACTS, streamed=True, complete=False)
    busy = line("chat", 1, ACTS, streamed=False, status=429)
    models = line("chat", 2, ACTS, streamed=False, path="models", request=b"")
    assert distill_session(recorded(tmp_path / "r.jsonl", lost, busy, models), FAMILY, "r") == ()


def test_a_reply_that_was_not_kept_whole_and_one_without_words_are_refused(tmp_path: Path) -> None:
    half = line("chat", 0, ACTS, streamed=True, truncated=True)
    with pytest.raises(RenderError, match="turn 0: the recorded reply is truncated"):
        distill_session(recorded(tmp_path / "half.jsonl", half), FAMILY, "r")
    needs_memory = line("responses", 0, ENDS, streamed=False)
    stored = {**json.loads(needs_memory.request), "previous_response_id": "resp_1"}
    changed = replace(needs_memory, request=json.dumps(stored).encode())
    with pytest.raises(RenderError, match="turn 0: 'previous_response_id' is not supported"):
        distill_session(recorded(tmp_path / "memory.jsonl", changed), FAMILY, "r")


def test_a_call_id_that_a_provider_uses_twice_is_no_name(tmp_path: Path) -> None:
    calls = [line("chat", 0, ACTS, streamed=False), line("chat", 1, ACTS, streamed=False)]
    (segment,) = distill_session(recorded(tmp_path / "r.jsonl", *calls), FAMILY, "train/1/0/0")
    assert len(texts(segment)) == 2


def test_the_last_try_is_the_one_that_was_graded(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"train-1-0-0.{number}.jsonl").touch()
    (tmp_path / "train-1-0-00.99.jsonl").touch()
    assert last_record(tmp_path, "train/1/0/0") == tmp_path / "train-1-0-0.10.jsonl"
    assert last_record(tmp_path, "train/9/0/0") is None


def test_reasoning_is_told_as_reasoning() -> None:
    message: Mapping[str, Any] = {"content": "So.", "reasoning_content": "Hm."}
    whole = {"choices": [{"message": message, "finish_reason": "stop"}]}
    call = parse_recorded_call("chat/completions", {"messages": [{"role": "user", "content": "?"}]}, whole)
    assert call is not None
    assert (call.reply.text, call.reply.reasoning, call.cut) == ("So.", "Hm.", False)
