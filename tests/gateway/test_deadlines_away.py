"""Waiting for an engine that is away is not the agent's time, and being stopped meanwhile not its failure."""

from __future__ import annotations

import asyncio
import time

import pytest
from gateway_rig import ASK, Rig, said

from insitu.chat.template import TemplateRenderer
from insitu.engines.downtime import engine_down
from insitu.gateway import deadlines as clock
from insitu.gateway import session as session_module
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits, RequestKey

ANSWER = said("done")
MORE = [*ASK, {"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]


class Away:
    """Waits before the first answer, as while an engine restarts; `then_s`: the answer itself."""

    def __init__(self, away_s: float, then_s: float = 0.0) -> None:
        self.away_s, self.then_s = away_s, then_s
        self.waits = asyncio.Event()

    async def __call__(self, key: RequestKey) -> None:
        if key.turn == 0:
            with engine_down(), engine_down():
                self.waits.set()
                await asyncio.sleep(self.away_s)
        await asyncio.sleep(self.then_s)


async def test_the_wall_stands_still_and_goes_on(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [ANSWER], limits=Limits(wall_s=0.4), before=Away(0.8)) as rig:
        status, _ = await rig.post({"messages": ASK})
        stats = rig.session.stats
        assert (status, stats.budget_stop, stats.infra_error) == (200, "", "")
        assert 0.8 <= stats.away_s < 5.0
        assert stats.away_since is None
        rig.engine.before = Away(0.0, then_s=30.0)
        began = time.monotonic()
        await rig.post({"messages": MORE})
        assert time.monotonic() - began < 10.0
        assert (stats.budget_stop, stats.infra_error) == ("wall", "")


async def test_the_engines_deadline_counts_only_while_it_is_there(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(engine_deadline_s=0.4)
    async with Rig(renderer, [ANSWER], config=config, before=Away(0.8)) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 200
    async with Rig(renderer, [ANSWER], config=config, before=Away(0.2, then_s=30.0)) as rig:
        assert (await rig.post({"messages": ASK}))[0] != 200
        assert rig.session.stats.infra_error == "engine gave no answer within 0.4 s"


async def test_the_deadline_of_a_queued_call_stands_still_while_the_engine_is_away(
    renderer: TemplateRenderer,
) -> None:
    """One call waits for the engine and holds the only place; another waits for the place."""
    config = GatewayConfig(max_concurrent_calls=1, engine_deadline_s=0.4)
    async with Rig(renderer, [ANSWER], config=config, before=Away(1.2)) as rig:
        first = asyncio.create_task(rig.post({"messages": ASK}))
        await asyncio.wait_for(rig.engine.before.waits.wait(), 10.0)  # type: ignore[union-attr]
        second = asyncio.create_task(rig.post({"messages": [*ASK, *ASK]}))
        assert [(await call)[0] for call in (first, second)] == [200, 200]


async def test_a_call_that_waits_for_tokens_stands_still_too(renderer: TemplateRenderer) -> None:
    limits = Limits(max_session_tokens=40, max_call_tokens=40)
    config = GatewayConfig(engine_deadline_s=0.4)
    async with Rig(renderer, [ANSWER], limits=limits, config=config, before=Away(1.2)) as rig:
        first = asyncio.create_task(rig.post({"messages": ASK}))
        await asyncio.wait_for(rig.engine.before.waits.wait(), 10.0)  # type: ignore[union-attr]
        second = asyncio.create_task(rig.post({"messages": MORE}))
        assert [(await call)[0] for call in (first, second)] == [200, 200]


async def test_a_parallel_call_that_does_not_wait_has_the_longer_wall_too(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [ANSWER], limits=Limits(wall_s=0.5), before=Away(1.2)) as rig:
        first = asyncio.create_task(rig.post({"messages": ASK}))
        await asyncio.wait_for(rig.engine.before.waits.wait(), 10.0)  # type: ignore[union-attr]
        rig.engine.before = Away(0.0, then_s=0.8)
        second = asyncio.create_task(rig.post({"messages": MORE}))
        assert [(await call)[0] for call in (first, second)] == [200, 200]
        assert rig.session.stats.budget_stop == ""


async def test_a_session_that_is_sealed_meanwhile_is_no_agents_failure(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(disconnect_grace_s=0.0)
    async with Rig(renderer, [ANSWER], config=config, before=Away(60.0)) as rig:
        call = asyncio.create_task(rig.post({"messages": ASK}))
        await asyncio.wait_for(rig.engine.before.waits.wait(), 10.0)  # type: ignore[union-attr]
        await rig.session.seal(0.0)
        assert rig.session.stats.infra_error == "the engine was down when the call was stopped"
        await asyncio.wait([call])


async def test_a_client_that_gave_up_and_is_answered_later_misses_nothing(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(disconnect_grace_s=0.0)
    async with Rig(renderer, [ANSWER], config=config, before=Away(60.0)) as rig:
        call = asyncio.create_task(rig.post({"messages": ASK}))
        await asyncio.wait_for(rig.engine.before.waits.wait(), 10.0)  # type: ignore[union-attr]
        (held,) = rig.session.calls
        call.cancel()
        await asyncio.wait([held.task], timeout=10.0)
        assert rig.session.stats.infra_error == "the engine was down when the call was stopped"
        assert (await rig.post({"messages": ASK}))[0] == 200
        assert rig.session.stats.infra_error == ""


async def test_no_session_waits_for_ever(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clock, session_module):
        monkeypatch.setattr(module, "AWAY_MOST_S", 0.2)
    async with Rig(renderer, [ANSWER], limits=Limits(wall_s=0.2), before=Away(60.0)) as rig:
        assert (await rig.post({"messages": ASK}))[0] != 200
        stats = rig.session.stats
        assert (stats.budget_stop, stats.away_s) == ("", 0.2)
        assert stats.infra_error == "the engine was down for longer than a session waits"


async def test_the_wall_stands_still_while_a_step_is_graded(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [ANSWER], limits=Limits(wall_s=0.6), before=Away(0.0, then_s=0.8)) as rig:
        session, began = rig.session, rig.session.clock()
        with session.grading():
            beside = asyncio.create_task(rig.post({"messages": ASK}))  # of a process that the step left
            assert (await beside)[0] == 200
            assert session.clock() - began < 0.5
        rig.engine.before = Away(0.0)
        assert (await rig.post({"messages": MORE}))[0] == 200
        assert (session.stats.budget_stop, session.stats.infra_error, session.step) == ("", "", 2)
        assert session.stats.graded_s >= 0.8
