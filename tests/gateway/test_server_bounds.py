"""What a gateway holds for clients that it does not know yet is bounded, and so is what tools are sent."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from contextlib import suppress
from typing import Any

import pytest
from gateway_rig import ASK, Rig, said
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.capture.forest import Forest
from insitu.chat.template import TemplateRenderer
from insitu.gateway import request
from insitu.gateway.body_parser import canonical_digest
from insitu.gateway.dialects.anthropic import AnthropicDialect
from insitu.gateway.dialects.base import Dialect, ParsedBody, WireError
from insitu.gateway.dialects.gemini import GeminiDialect
from insitu.gateway.host_tools import HostTool, ToolBox
from insitu.gateway.request import GatewayConfig, decode, loads, too_many_values
from insitu.types import Limits, ModelRequest

BIG = 123456789012345678901234567890
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(rig: Rig) -> Pair:
    return await asyncio.open_connection("127.0.0.1", int(rig.origin.rpartition(":")[2]))


async def status(pair: Pair) -> int:
    """Of the answer; 0 when the connection was closed instead."""
    try:
        async with asyncio.timeout(20):
            line = await pair[0].readline()
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


async def closed(*pairs: Pair) -> None:
    for pair in pairs:
        pair[1].close()
        with suppress(ConnectionError):
            await pair[1].wait_closed()


async def test_bodies_that_no_session_has_taken_on_share_one_bound(renderer: TemplateRenderer) -> None:
    """Slow senders cannot fill the memory together; who asks again after them is served."""
    body = json.dumps({"messages": [*ASK, {"role": "user", "content": "x" * 60_000}]}).encode()
    async with Rig(renderer, [said("ok")], config=GatewayConfig(max_intake_bytes=100_000)) as rig:

        async def send(part: bytes) -> Pair:
            pair = await connect(rig)
            head = f"POST /s/{rig.session.public_id}/v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
            head += f"Authorization: {rig.auth['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
            pair[1].write(head.encode() + part)
            await pair[1].drain()
            return pair

        slow = await send(body[:-1])
        for _ in range(2000):
            if rig.gateway.intake.held == len(body) - 1:
                break
            await asyncio.sleep(0.01)
        late = await send(body)
        assert await status(late) == 429
        slow[1].write(body[-1:])
        assert await status(slow) == 200
        again = await send(body)
        assert await status(again) == 200
        await closed(slow, late, again)
        assert rig.gateway.intake.held == 0


@pytest.mark.slow
@pytest.mark.case(47)
async def test_while_a_body_of_60_mb_is_read_other_sessions_are_served(renderer: TemplateRenderer) -> None:
    """At the default limits, and of what is slowest to look through: beginnings of markers."""
    body = b'{"messages":[{"role":"user","content":"' + b"<" * 59_999_999 + b"<|im_end|>" + b'"}]}'
    small = {"messages": ASK}
    served = 0
    # A context that such a body might fit.
    async with Rig(renderer, [said("ok")], limits=Limits(max_context_tokens=1_000_000)) as rig:
        limits = Limits(max_context_tokens=100_000, max_calls=10_000)
        other = rig.gateway.open_session("r/1", seed=7, limits=limits)
        url = f"{rig.origin}/s/{other.public_id}/v1/chat/completions"
        auth = {"Authorization": f"Bearer {other.secret}"}

        async def post_big() -> tuple[int, str]:
            target = f"{rig.base}/chat/completions"
            async with rig.http.post(target, data=io.BytesIO(body), headers=rig.auth) as response:
                return response.status, (await response.json())["error"]["code"]

        big = asyncio.create_task(post_big())
        while not big.done():
            whole = rig.gateway.intake.held == len(body)
            async with rig.http.post(url, json=small, headers=auth) as response:
                assert response.status == 200
            served += whole
            await asyncio.sleep(0.01)
        assert await big == (400, "context_length_exceeded")
        assert served > 1
        assert rig.session.stats.injections == 0
        assert rig.gateway.intake.held == 0


@pytest.mark.case(16, 47)
async def test_more_messages_than_the_context_has_tokens_are_not_looked_at(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(renderer, [said("ok")], limits=Limits(max_context_tokens=500)) as rig:
        monkeypatch.setattr(Forest, "plan", None)
        many = {"messages": [{"role": "user", "content": ""}] * 501}
        status, body = await rig.post(many)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "resulted in at least 501 tokens" in body["error"]["message"]
        items = {"input": [{"role": "user", "content": "x"}] * 501}
        url = f"{rig.base}/responses/input_tokens"
        async with rig.http.post(url, json=items, headers=rig.auth) as response:
            assert response.status == 400
        monkeypatch.undo()
        assert (rig.session.stats.overflows, rig.session.stats.truncated) == (1, True)
        assert (await rig.post({"messages": ASK}))[0] == 200


@pytest.mark.case(47)
def test_millions_of_values_are_refused_before_a_reader_holds_up_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(raw: bytes) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(request, "loads", never)
    for value in (b"[]", b"{}", b"1", b'""'):
        body = b'{"messages":[' + (value + b",") * (6_000_000 // (len(value) + 1)) + value + b"]}"
        with pytest.raises(WireError, match="too many items"):
            decode(body, 128, 1_000_000)
    with pytest.raises(AssertionError, match="it was read"):
        decode(b'{"x":"' + b"[{," * 1_000_000 + b'"}', 128, 1_000_000)


HARD = st.sampled_from(['"', "\\", "[", "]", "{", ",", "a", "\u00e9"])
JSON = st.recursive(
    st.none() | st.integers() | st.lists(HARD).map("".join),
    lambda inner: st.lists(inner) | st.dictionaries(st.lists(HARD).map("".join), inner),
)


def held(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(inside) + sum(map(held, inside))


@settings(max_examples=60)
@given(JSON, st.booleans())
def test_values_are_counted_without_being_read(value: Any, escaped: bool) -> None:
    raw = json.dumps(value, ensure_ascii=escaped).encode()
    count = held(value)
    assert not too_many_values(raw, count)
    if count > 1:
        assert too_many_values(raw, (count - 1) // 2 - 1)


@pytest.mark.parametrize("raw", [b'"', b'"\\', b'"\\"' * 100_000, b'["' + b'\\"' * 1_000_000])
def test_a_text_without_end_is_looked_at_once(raw: bytes) -> None:
    assert not too_many_values(raw + b"," * 10, 20)


async def test_connections_beyond_the_bound_push_out_those_without_a_key(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], config=GatewayConfig(max_connections=3)) as rig:

        async def asked(pair: Pair, path: str = "/health") -> int:
            key = rig.auth["Authorization"]
            head = f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: {key}\r\n\r\n"
            pair[1].write(head.encode())
            found = await status(pair)
            if found:
                rest = await pair[0].readuntil(b"\r\n\r\n")
                size = re.search(rb"Content-Length: (\d+)", rest)
                assert size is not None
                await pair[0].readexactly(int(size[1]))
            return found

        idle = [await connect(rig) for _ in range(8)]
        agent = await connect(rig)
        assert await asked(agent, "/v1/models") == 200
        more = [await connect(rig) for _ in range(8)]
        assert await asked(agent, "/v1/models") == 200
        agents = [agent, *[await connect(rig) for _ in range(2)]]
        assert [await asked(pair, "/v1/models") for pair in agents] == [200] * 3
        # A client with a key is never evicted: the newcomer is refused.
        extra = await connect(rig)
        assert await asked(extra) == 0
        assert [await asked(pair, "/v1/models") for pair in agents] == [200] * 3
        await closed(*idle, *more, *agents, extra)
        for _ in range(200):
            later = await connect(rig)
            answer = await asked(later)
            await closed(later)
            if answer == 200:
                break
            await asyncio.sleep(0.02)
        assert answer == 200


async def test_each_of_several_connections_at_once_pushes_out_another_one(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], config=GatewayConfig(max_connections=3)) as rig:
        host, port = rig.origin.removeprefix("http://").split(":")
        # None is accepted before all are there: this test holds the loop.
        opened = [socket.create_connection((host, int(port))) for _ in range(9)]
        await asyncio.sleep(0.2)

        def gone(one: socket.socket) -> bool:
            one.setblocking(False)
            try:
                return one.recv(1) == b""
            except BlockingIOError:
                return False

        assert [gone(one) for one in opened] == [True] * 6 + [False] * 3
        for one in opened:
            one.close()


def test_what_host_tools_are_sent_is_bounded_in_bytes() -> None:
    sandbox = ToolBox([HostTool(name="note", description="", parameters={"type": "object"})], max_bytes=50)
    assert sandbox.call("note", {"a": "x" * 20})["ok"]
    with pytest.raises(WireError, match="too much"):
        sandbox.call("note", {"a": "x" * 20})
    assert sandbox.call("note", {})["ok"]
    assert len(sandbox.calls) == 2


USED = {"type": "tool_use", "id": "t", "name": "f", "input": {"n": BIG}}
ANTHROPIC = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [USED]},
    {"role": "user", "content": "b"},
]
CALLED = {"functionCall": {"id": "t", "name": "f", "args": {"n": BIG}}}
GEMINI = [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [CALLED]}]


@pytest.mark.parametrize(
    ("dialect", "action", "body"),
    [
        (AnthropicDialect(), "messages", {"max_tokens": 9, "messages": ANTHROPIC}),
        (GeminiDialect(), "models/m:generateContent", {"contents": GEMINI}),
    ],
    ids=["anthropic", "gemini"],
)
def test_whole_numbers_beyond_64_bits_are_echoed_digit_by_digit(
    dialect: Dialect, action: str, body: dict[str, Any]
) -> None:
    """Otherwise an agent that echoes what the model wrote would seem to have edited it."""
    raw = json.dumps(body).encode()
    request = dialect.parse(decode(raw, 64, 1000), action).request
    assert json.loads(request.messages[1].tool_calls[0].arguments) == {"n": BIG}
    request = ModelRequest(messages=())
    spelled = [ParsedBody(request=request, raw=one) for one in (raw, json.dumps(body, indent=1).encode())]
    assert canonical_digest(spelled[0]) == canonical_digest(spelled[1])


def test_numbers_of_absurd_length_and_long_digits_in_texts_do_not_fail() -> None:
    assert loads(b'["12345678901234567890123"]') == ["12345678901234567890123"]
    assert loads(b"[1.5, %d]" % BIG) == [1.5, BIG]
    assert loads(b"[%s]" % (b"1" * 300)) == [int("1" * 300)]
