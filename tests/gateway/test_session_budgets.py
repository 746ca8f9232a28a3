"""Budgets end a session so that the agent stops; nothing synthetic is ever trained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.base import WireError
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.reply_checks import mint_call_id
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits, Message, RequestKey

LOOP = Message(role="assistant", tool_calls=(call("read", "{}"),))


def grown(n: int) -> list[dict[str, str]]:
    return [*ASK, *({"role": "user", "content": f"more {i}"} for i in range(n))]


@pytest.mark.parametrize(
    ("limits", "budget", "calls"),
    [
        (Limits(max_calls=2), "calls", 2),
        (Limits(max_session_tokens=5), "tokens", 1),
        (Limits(wall_s=1e-9), "wall", 0),
    ],
)
async def test_an_exhausted_budget_stops_the_agent(
    renderer: TemplateRenderer, limits: Limits, budget: str, calls: int
) -> None:
    async with Rig(renderer, [LOOP], limits=limits) as rig:
        for i in range(calls + 2):
            status, body = await rig.post({"messages": grown(i), "tools": TOOLS})
            assert status == 200
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        assert budget in choice["message"]["content"]
        assert body["usage"]["total_tokens"] == 0
        assert rig.session.stats.budget_stop == budget
        assert len(rig.engine.sent) == calls
        trajectory = await rig.session.seal(1.0)
        assert len(trajectory.turns) == calls
        assert trajectory.ledger.captured == rig.session.stats.sampled_tokens


async def test_wall_time_ends_a_call_at_the_engine(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [LOOP], limits=Limits(wall_s=0.1), delay_s=30.0) as rig:
        status, body = await rig.post({"messages": ASK})
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "stop"
        assert rig.session.stats.budget_stop == "wall"
        assert len(rig.engine.aborted) == 1
        assert rig.session.stats.infra_error == ""


async def test_tokens_held_back_for_a_parallel_call_are_waited_for(renderer: TemplateRenderer) -> None:
    """A call may take all that is left, but it comes back short: the other one is no budget stop."""
    release = asyncio.Event()

    async def hold(key: RequestKey) -> None:
        if key.turn == 0:
            await release.wait()

    limits = Limits(max_call_tokens=100, max_session_tokens=100)
    async with Rig(renderer, [said("x"), said("y")], limits=limits, before=hold) as rig:
        first = asyncio.create_task(rig.post({"messages": ASK}))
        async with asyncio.timeout(5.0):
            while not rig.engine.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            second = asyncio.create_task(rig.post({"messages": grown(1)}))
            while rig.session.stats.calls < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            release.set()
            texts = [(await task)[1]["choices"][0]["message"]["content"] for task in (first, second)]
        assert texts == ["x", "y"]
        assert rig.session.stats.budget_stop == ""
        assert rig.engine.sent[1].params.max_tokens == 100 - len(renderer.render_reply(said("x")))


@pytest.mark.case(16)
async def test_limits_of_one_call(renderer: TemplateRenderer) -> None:
    limits = Limits(max_call_tokens=6, max_session_tokens=15, max_context_tokens=60)
    async with Rig(renderer, [said("abc def ghi jkl mno pqr stu")], limits=limits) as rig:
        _, body = await rig.post({"messages": ASK, "max_tokens": 4})
        assert body["choices"][0]["finish_reason"] == "length"
        await rig.post({"messages": grown(1), "max_tokens": 10**9})
        await rig.post({"messages": grown(1)})
        assert [s.params.max_tokens for s in rig.engine.sent] == [4, 6, 5]
        assert {s.params.temperature for s in rig.engine.sent} == {1.0}
        assert rig.session.stats.truncated


@pytest.mark.case(16)
async def test_a_prompt_at_the_limit_fits_with_one_token_and_one_more_does_not(
    renderer: TemplateRenderer,
) -> None:
    prompt = 0
    async with Rig(renderer, [said("a")]) as rig:
        await rig.post({"messages": ASK})
        prompt = len(rig.engine.sent[0].ids)
    for room, status in ((1, 200), (0, 400)):
        async with Rig(renderer, [said("a")], limits=Limits(max_context_tokens=prompt + room)) as rig:
            got, body = await rig.post({"messages": ASK, "stream": False})
            assert got == status
            if status == 400:
                assert body["error"]["code"] == "context_length_exceeded"
                assert str(prompt) in body["error"]["message"]
                assert rig.session.stats.overflows == 1
            assert (await rig.session.seal(1.0)).ledger.balanced


async def test_overflows_count_as_calls_so_that_no_agent_loops(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("a")], limits=Limits(max_context_tokens=3, max_calls=4)) as rig:
        statuses = [(await rig.post({"messages": ASK}))[0] for _ in range(6)]
        assert statuses == [400, 400, 400, 400, 200, 200]


async def test_call_ids_are_a_function_of_their_place(renderer: TemplateRenderer) -> None:
    twice = Message(role="assistant", tool_calls=(call("read", "{}"), call("read", "{}")))
    seen = []
    for _ in range(2):
        async with Rig(renderer, [twice]) as rig:
            _, body = await rig.post({"messages": ASK, "tools": TOOLS})
            seen.append([c["id"] for c in body["choices"][0]["message"]["tool_calls"]])
    assert seen[0] == seen[1] == [mint_call_id(7, "r/0", 0, 0), mint_call_id(7, "r/0", 0, 1)]


async def test_a_count_is_within_the_budgets_and_the_cap(renderer: TemplateRenderer) -> None:
    def counted(rig: Rig) -> Awaitable[int]:
        return rig.session.count_tokens(ChatDialect().parse({"messages": ASK}, "").request)

    config = GatewayConfig(max_concurrent_calls=1, max_waiting_calls=0, inline_chars=0)
    async with Rig(renderer, [said("a")], limits=Limits(max_calls=1), config=config) as rig:
        first = asyncio.ensure_future(counted(rig))
        await asyncio.sleep(0)
        with pytest.raises(WireError) as refused:
            await counted(rig)
        assert refused.value.cause == "rate_limited"
        assert await first > 0
        await rig.post({"messages": ASK})
        with pytest.raises(WireError) as refused:
            await counted(rig)
        assert refused.value.cause == "session_failed"
        assert rig.session.stats.budget_stop == ""


async def test_text_that_cannot_fit_is_not_encoded(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("a")], limits=Limits(max_context_tokens=1000)) as rig:
        # Few tokens for its length, if it were encoded: what refuses it is its length.
        body = {"messages": [{"role": "user", "content": "x" * 17_000}]}
        with pytest.raises(WireError) as refused:
            await rig.session.count_tokens(ChatDialect().parse(body, "").request)
        assert (refused.value.cause, rig.session.stats.overflows) == ("context_length_exceeded", 0)
        status, answer = await rig.post(body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "1062 tokens" in answer["error"]["message"]
        assert rig.session.stats.overflows == 1
        assert (await rig.post({"messages": ASK}))[0] == 200
