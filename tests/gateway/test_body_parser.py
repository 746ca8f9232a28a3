"""What agents may and may not send."""

from __future__ import annotations

import gzip
import json
from typing import Any

import orjson
import pytest
from gateway_rig import ASK, TOOLS, Rig, said

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.base import WireError
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.request import GatewayConfig, replace_lone_surrogates
from insitu.types import Message, ModelRequest, ToolCall


def parse(body: dict[str, Any]) -> ModelRequest:
    return ChatDialect().parse(body, "chat/completions").request


def test_messages_in_every_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}, "index": 0}
    request = parse(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
                {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
                {"role": "tool", "tool_call_id": "c1", "content": "d"},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "e"}, {"type": "text", "text": "f"}],
                },
            ],
            "unknown": {"x": 1},
        }
    )
    assert request.messages == (
        Message(role="system", text="a"),
        Message(role="user", text="b\nc"),
        Message(
            role="assistant", reasoning="r", tool_calls=(ToolCall(id="c1", name="f", arguments='{"a":1}'),)
        ),
        Message(role="tool", text="d", tool_call_id="c1"),
        Message(role="assistant", text="ef"),
    )


def test_wishes_are_recorded_and_limits_only_shorten() -> None:
    request = parse(
        {
            "messages": ASK,
            "temperature": 0,
            "logit_bias": {"5": 1},
            "max_tokens": 9,
            "max_completion_tokens": 7,
        }
    )
    assert request.max_tokens == 7
    ignored_params = dict(request.advisory)
    assert (ignored_params["temperature"], ignored_params["logit_bias"]) == ("0", '{"5":1}')


def test_tool_schemas_keep_their_order_and_tool_choice_none_offers_none() -> None:
    assert parse({"messages": ASK, "tools": TOOLS}).tools[0].parameters == (
        '{"type":"object","properties":{"path":{"type":"string"}}}'
    )
    assert parse({"messages": ASK, "tools": TOOLS, "tool_choice": "none"}).tools == ()


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": [1]}, "stop"),
        ({"functions": [{}]}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"stream_options": []}, "stream_options"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(WireError) as refused:
        parse({"messages": ASK, **extra})
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages": "\xff"}', 400),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', 400),
        (b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
        (b'{"x": ' + b"[" * 100_000, 400),
        (b'{"x": "' + b"a" * 70_000 + b'"}', 413),
    ],
)
async def test_bad_bodies_are_answered_and_nothing_runs(
    renderer: TemplateRenderer, raw: bytes, status: int
) -> None:
    async with Rig(renderer, [said("x")], config=GatewayConfig(max_body_bytes=60_000)) as rig:
        raw = raw if len(raw) < 100_000 or status == 413 else raw[:50_000]
        async with rig.http.post(f"{rig.base}/chat/completions", data=raw, headers=rig.auth) as response:
            assert response.status == status
            assert "error" in await response.json()
        assert not rig.engine.sent
        assert rig.gateway.counters.defects == 0


async def test_a_compressed_body_counts_by_what_it_unpacks_to(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], config=GatewayConfig(max_body_bytes=60_000)) as rig:
        for size, status in ((10, 200), (10_000_000, 413)):
            body = {"messages": [{"role": "user", "content": "a" * size}]}
            headers = {**rig.auth, "Content-Encoding": "gzip"}
            data = gzip.compress(json.dumps(body).encode())
            async with rig.http.post(f"{rig.base}/chat/completions", data=data, headers=headers) as response:
                assert response.status == status


async def test_a_conversation_that_the_template_refuses_is_the_agents_error(
    renderer: TemplateRenderer,
) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        bad = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1"}}]}
        status, _ = await rig.post({"messages": [*ASK, bad, {"role": "user", "content": "\0"}]})
        assert status == 200


@pytest.mark.case(47)
@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\ude00b", "\ufffdb"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        (rb"\ud83d\ude00" * 5000 + rb"\ud83d", "\U0001f600" * 5000 + "\ufffd"),
        (rb"\\ud83d", "\\ud83d"),
        (rb"\\\ud83d\n", "\\\ufffd\n"),
        (rb"\u0000\uD7FF\uE000", "\0\ud7ff\ue000"),
    ],
)
def test_half_a_surrogate_pair_becomes_one_replacement(sent: bytes, meant: str) -> None:
    assert orjson.loads(replace_lone_surrogates(b'"' + sent + b'"')) == meant


@pytest.mark.case(47)
async def test_a_text_cut_within_an_emoji_does_not_end_the_session(renderer: TemplateRenderer) -> None:
    raw = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    async with Rig(renderer, [said("x")]) as rig:
        for _ in range(2):
            async with rig.http.post(f"{rig.base}/chat/completions", data=raw, headers=rig.auth) as response:
                assert response.status == 200
        assert "cut \ufffd" in renderer.decode(rig.engine.sent[0].ids)


@pytest.mark.case(25)
@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], "missing"])
async def test_no_content_is_the_same_however_it_is_written(renderer: TemplateRenderer, content: Any) -> None:
    said = Message(role="assistant", tool_calls=(ToolCall(id="", name="read", arguments='{"path":"a"}'),))
    async with Rig(renderer, [said]) as rig:
        ask = [{"role": "user", "content": "Fix f."}]
        _, reply = await rig.post({"model": "m", "messages": ask, "tools": TOOLS})
        echo = {"role": "assistant", "tool_calls": reply["choices"][0]["message"]["tool_calls"]}
        if content != "missing":
            echo["content"] = content
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "done"}
        status, _ = await rig.post({"model": "m", "messages": [*ask, echo, result], "tools": TOOLS})
        assert status == 200
        assert (rig.session.stats.edited, rig.session.stats.forks) == (0, 0)
        first, second = rig.engine.sent
        assert second.ids[: len(first.ids)].tolist() == first.ids.tolist()
        assert len((await rig.session.seal(5.0)).segments) == 1
