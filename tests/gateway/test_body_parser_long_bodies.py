"""Long bodies are parsed off the event loop, one at a time, whether or not their clients wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import orjson
import pytest
from gateway_rig import ASK, Rig, said

from insitu.capture.forest import Forest
from insitu.chat.template import TemplateRenderer
from insitu.gateway.body_parser import INLINE_BYTES, INLINE_VALUES, BodyParser
from insitu.gateway.dialects.base import ParsedBody, WireError
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.prompt_ids import planned
from insitu.gateway.request import GatewayConfig

Body = dict[str, Any]


async def test_a_long_body_does_not_hold_up_the_event_loop() -> None:
    bodies = BodyParser(128, 1 << 20)
    for text, inline in (("x", True), ("\\ud83d" * (INLINE_BYTES // 6 + 1), False)):
        raw = b'{"messages":[{"role":"user","content":"' + text.encode() + b'"}]}'
        reading = asyncio.create_task(bodies.read(ChatDialect(), raw, ""))
        await asyncio.sleep(0)
        assert reading.done() == inline
        wire = await reading
        assert len(wire.request.messages) == 1


async def test_nor_does_a_short_one_of_many_values_while_they_are_new() -> None:
    bodies = BodyParser(128, 1 << 20)
    many = [{"role": "user", "content": "x"}] * (INLINE_VALUES // 3 + 1)
    for messages, inline in ((many, False), ([*many, {"role": "user", "content": "y"}], True)):
        raw = orjson.dumps({"messages": messages})
        assert len(raw) < INLINE_BYTES
        reading = asyncio.create_task(bodies.read(ChatDialect(), raw, ""))
        await asyncio.sleep(0)
        assert reading.done() == inline
        wire = await reading
        assert len(wire.request.messages) == len(messages)
        Forest("r").plan(wire.request, "f")


class Slow(ChatDialect):
    """Reads long conversations when the test asks for it."""

    def __init__(self) -> None:
        self.may, self.begun, self.under_way, self.most = threading.Event(), threading.Event(), 0, 0

    def parse(self, body: Body, action: str) -> ParsedBody:
        if len(body["messages"]) < INLINE_VALUES // 3:
            return super().parse(body, action)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.begun.set()
        assert self.may.wait(20)
        self.under_way -= 1
        return super().parse(body, action)


@pytest.mark.case(24)
async def test_a_client_that_leaves_while_its_body_is_parsed_finds_it_parsed_once() -> None:
    bodies, dialect = BodyParser(128, 1 << 20), Slow()
    short: list[Body] = [{"role": "user", "content": "x"}]
    wire = await bodies.read(dialect, orjson.dumps({"messages": short}), "")
    Forest("r").plan(wire.request, "f")
    long = orjson.dumps({"messages": [*short, *short * INLINE_VALUES]})
    left = asyncio.create_task(bodies.read(dialect, long, ""))
    assert await asyncio.to_thread(dialect.begun.wait, 20)
    left.cancel()
    retry = asyncio.create_task(bodies.read(dialect, long, ""))
    await asyncio.sleep(0.05)
    left.cancel()
    await asyncio.sleep(0.05)
    dialect.may.set()
    wire = await retry
    assert len(wire.request.messages) == 1 + INLINE_VALUES
    assert dialect.most == 1
    with pytest.raises(asyncio.CancelledError):
        await left


LONG = [{"role": "user", "content": "x"}] * INLINE_VALUES


async def test_known_messages_of_a_long_body_are_read_again_in_a_thread() -> None:
    """The second body goes on from the first one, which was refused: nothing sampled holds its messages."""
    bodies, forest, dialect = BodyParser(128, 1 << 20), Forest("r"), ChatDialect()
    for more in ([], [{"role": "user", "content": "y"}]):
        wire = await bodies.read(dialect, orjson.dumps({"messages": [*LONG, *more]}), "")
        planning = asyncio.create_task(planned(forest, wire.request, "f"))
        await asyncio.sleep(0)
        assert planning.done() == (not more), "what is known is parsed on the event loop"
        plan = await planning
        assert len(plan.replace) == len(LONG) + len(more)
        assert plan.replace[-1].text == ("y" if more else "x")


async def test_short_known_messages_are_read_again_at_once() -> None:
    bodies, forest, dialect = BodyParser(128, 1 << 20), Forest("r"), ChatDialect()
    for count in (2, 3):
        wire = await bodies.read(dialect, orjson.dumps({"messages": LONG[:count]}), "")
        planning = asyncio.create_task(planned(forest, wire.request, "f"))
        await asyncio.sleep(0)
        assert planning.done()


@pytest.mark.slow
async def test_a_client_that_leaves_and_comes_back_is_served(renderer: TemplateRenderer) -> None:
    long = {"messages": [*ASK, *LONG]}
    async with Rig(renderer, [said("ok")]) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 200
        for max_wait_s in (0.04, 0.06):
            with suppress(TimeoutError):
                await asyncio.wait_for(rig.post(long), max_wait_s)
        status, _ = await rig.post(long)
        assert (status, rig.gateway.counters.defects) == (200, 0)


async def test_a_body_that_is_refused_when_read_as_a_whole_overflows_nothing(
    renderer: TemplateRenderer,
) -> None:
    """Its parts were within the limit on values, and nothing sampled holds the first of them."""
    part = [{"role": "user", "content": "x"}] * 20
    async with Rig(renderer, [said("ok")], config=GatewayConfig(max_json_items=100)) as rig:
        bodies = rig.session.bodies
        wire = await bodies.read(ChatDialect(), orjson.dumps({"messages": part}), "")
        Forest("r").plan(wire.request, "f")
        wire = await bodies.read(ChatDialect(), orjson.dumps({"messages": part * 2}), "")
        call = rig.session.admit(wire)
        with pytest.raises(WireError) as refused:
            await call.task
        assert refused.value.cause == "invalid_request"
        assert (rig.session.stats.overflows, rig.session.stats.truncated) == (0, False)


@pytest.mark.case(47)
async def test_other_sessions_are_served_while_many_messages_are_read_and_rendered(
    renderer: TemplateRenderer,
) -> None:
    """By CPU time, of which other work on the machine takes nothing: the longest stretch of the event loop
    against all that the call needs."""
    async with Rig(renderer, [said("ok")]) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 200
        for more in (0, 1):
            began, worst = time.process_time(), 0.0
            call = asyncio.create_task(rig.post({"messages": [*ASK, *LONG, *LONG[:more]]}))
            while not call.done():
                before = time.thread_time()
                await asyncio.sleep(0.002)
                worst = max(worst, time.thread_time() - before)
            assert (await call)[0] == 200
            assert worst < (time.process_time() - began) / 4
