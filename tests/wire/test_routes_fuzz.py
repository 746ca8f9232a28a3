"""Whatever is sent, the agent gets an answer of its provider's shape and the session lives on.

INSITU_FUZZ sets how many bodies each format gets; half are real bodies with wounds, half are bytes.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from agent_bodies import BODIES, PATHS
from gateway_rig import Rig
from wire_lab import CALLS, SAY, THINK

from insitu.chat.template import TemplateRenderer
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits

COUNT = int(os.environ.get("INSITU_FUZZ", "300"))
BATCH = 200
"""Bodies per session."""

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, float("inf"), float("nan"),
    "", " ", "\x00", "\ud800", "🙂\udfff", "<|im_end|>\n<|im_start|>system", "<tool_call>", "text", "user",
    "assistant", "function", "none", "a" * 5000, [], [[]], [None], [""], [{}], {}, {"": {}}, {"type": {}},
    {"type": "compaction_trigger"}, {"type": "compaction", "encrypted_content": "insitu1.YQ=="},
    {"type": "text"}, {"type": "text", "text": "x"}, {"role": "user"}, {"text": None}, {"type": ["text"]},
)  # fmt: skip


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        found.append((value, key))
        if isinstance(inner, dict | list):
            places(inner, found)
    return found


def wound(body: dict[str, Any], rng: random.Random) -> None:
    """One change anywhere in the body."""
    spots = places(body, [])
    container, key = rng.choice(spots)
    kind = rng.randrange(8)
    if kind <= 2:
        container[key] = copy.deepcopy(rng.choice(JUNK))
    elif kind == 3:
        del container[key]
    elif kind == 4:
        container[key] = copy.deepcopy(container[key]) if rng.random() < 0.2 else [container[key]]
    elif kind == 5:
        other, place = rng.choice(spots)
        container[key] = copy.deepcopy(other[place])
    elif kind == 6 and isinstance(container, list):
        rng.shuffle(container)
        container += copy.deepcopy(container[: rng.randrange(3)])
    elif isinstance(container, dict):
        container[rng.choice(("type", "role", "content", "parts", "input", "x"))] = container.pop(key)


def structured(name: str, rng: random.Random) -> bytes:
    body = BODIES[name]()
    if rng.random() < 0.1:
        body |= BODIES[rng.choice(list(BODIES))]()
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        wound(body, rng)
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def raw(name: str, rng: random.Random) -> bytes:
    kind = rng.randrange(8)
    whole = json.dumps(BODIES[name]()).encode()
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return whole[: rng.randrange(len(whole))]
    if kind == 2:
        at = rng.randrange(len(whole))
        return whole[:at] + rng.randbytes(rng.randrange(1, 5)) + whole[at + rng.randrange(5) :]
    if kind == 3:
        depth = rng.choice((10, 127, 128, 129, 1000, 100_000))
        return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    if kind == 4:
        return rng.choice((b"", b"null", b"[]", b'""', b"0", b"{}", b"{]", b"\xff\xfe{}", b"\xef\xbb\xbf{}"))
    if kind == 5:
        grown = BODIES[name]()
        for key in ("messages", "input", "contents"):
            if key in grown:
                grown[key] = grown[key] * rng.choice((2, 50))
        return json.dumps(grown).encode()
    if kind == 6:
        return whole.replace(b"policy", b"\\ud800" if rng.random() < 0.5 else b"\xed\xa0\x80")
    return whole[:-1] + b',"x":' + b"9" * rng.randrange(1, 5000) + b"}"


async def check(response: aiohttp.ClientResponse, name: str, sent: bytes) -> int:
    """The answer has the provider's shape. Returns its status."""
    answer = await response.read()
    assert response.status < 500, (sent, answer)
    if response.status == 200:
        if response.content_type != "text/event-stream":
            assert isinstance(json.loads(answer), dict | list)
        elif name == "responses":
            assert b"event: response." in answer
        else:
            assert b"data: " in answer
        return 200
    assert response.status >= 400, (sent, answer)
    error = json.loads(answer)["error"]
    assert isinstance(error["message"], str)
    if name == "anthropic":
        assert json.loads(answer)["type"] == "error"
    if name == "gemini":
        assert error["code"] == response.status
    return response.status


@pytest.mark.fuzz
@pytest.mark.case(47)
@pytest.mark.fuzz
@pytest.mark.parametrize("make", [structured, raw], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", BODIES)
async def test_no_body_breaks_the_gateway(
    renderer: TemplateRenderer, name: str, make: Callable[[str, random.Random], bytes]
) -> None:
    rng = random.Random(f"{name} {make.__name__}")
    limits = Limits(max_calls=1 << 30, max_session_tokens=1 << 30, max_context_tokens=100_000, wall_s=3600)
    seen: Counter[int] = Counter()
    async with Rig(renderer, [SAY, CALLS, THINK], limits=limits, config=GatewayConfig()) as rig:
        for start in range(0, COUNT // 2, BATCH):
            session = rig.gateway.open_session(f"fuzz/{start}", seed=start, limits=limits)
            auth = {"Authorization": f"Bearer {session.secret}", "Content-Type": "application/json"}
            base = f"{rig.origin}/s/{session.public_id}"
            timeout = aiohttp.ClientTimeout(total=60)
            for _ in range(min(BATCH, COUNT // 2 - start)):
                sent = make(name, rng)
                url = base + rng.choice(PATHS[name])
                async with rig.http.post(url, data=sent, headers=auth, timeout=timeout) as response:
                    seen[await check(response, name, sent)] += 1
            url = base + PATHS[name][0]
            async with rig.http.post(url, json=BODIES[name](), headers=auth, timeout=timeout) as response:
                assert response.status == 200
            assert (await session.seal(5.0)).ledger.balanced
            assert not session.stats.infra_error
        assert rig.gateway.counters.defects == 0
        assert rig.engine.in_flight == 0
    assert min(seen[200], seen[400]) > COUNT // 40  # both what is read and what is refused was reached


@pytest.mark.case(47)
@pytest.mark.parametrize("name", BODIES)
async def test_a_million_elements_are_refused(renderer: TemplateRenderer, name: str) -> None:
    key = {"responses": b"input", "gemini": b"contents"}.get(name, b"messages")
    sent = b'{"' + key + b'":[' + b'{"role":"user"},' * 999_999 + b'{"role":"user"}]}'
    async with Rig(renderer, [SAY]) as rig:
        url = f"{rig.origin}/s/{rig.session.public_id}{PATHS[name][0]}"
        async with rig.http.post(url, data=io.BytesIO(sent), headers=rig.auth) as response:
            assert await check(response, name, b"") in (400, 413)
        async with rig.http.post(url, json=BODIES[name](), headers=rig.auth) as response:
            assert response.status == 200
        assert not rig.gateway.counters.defects
