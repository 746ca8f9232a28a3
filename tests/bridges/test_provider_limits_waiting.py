"""Waiting for a provider: turns, minutes, Retry-After, back-off, and the end of patience."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.gateway.dialects.base import WireError
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.types import Limits
from insitu_bridges.provider import limits as outage
from insitu_bridges.provider.backend import ProviderBackend, ProviderSession, open_provider
from insitu_bridges.provider.limits import ProviderOptions, RateLimiter
from tests.fakes.provider import KEY, FakeProvider, serve_provider

PLENTY = Limits(max_calls=100)


class Lab:
    def __init__(self, provider: FakeProvider, backend: ProviderBackend, session: Session, url: str) -> None:
        self.provider, self.backend, self._url = provider, backend, url
        assert isinstance(session, ProviderSession)
        self.session = session

    @property
    def trouble(self) -> str:
        return self.session.stats.infra_error

    async def ask(self, **more: Any) -> int:
        head = {"Authorization": f"Bearer {self.session.secret}"}
        body = {"model": "big-model", "messages": [], **more}
        async with aiohttp.ClientSession() as http, http.post(self._url, json=body, headers=head) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def lab(folder: Path, limits: Limits = PLENTY, **options: Any) -> AsyncIterator[Lab]:
    async with serve_provider() as fake:
        chosen = ProviderOptions(
            **{"url": fake.url, "model": "big-model", "key": KEY, "max_wait_s": 0.0, **options}
        )
        async with (
            open_provider(chosen, folder) as backend,
            Gateway(backend) as gateway,
            gateway.listen_tcp() as listener,
        ):
            session = gateway.open_session("r/0", limits=limits)
            yield Lab(fake, backend, session, f"{listener.origin}/s/{session.public_id}/v1/chat/completions")


async def test_a_busy_provider_is_asked_again_and_the_agent_hears_only_the_answer(tmp_path: Path) -> None:
    async with lab(tmp_path, max_wait_s=30.0) as it:
        it.provider.busy = [(429, "0.1"), (503, "0.1"), (529, "0")]
        assert await it.ask() == 200
        assert len(it.provider.received) == 4
        assert (it.session.turns, it.session.stats.calls, it.trouble) == (1, 1, "")
        assert it.session.stats.waited_s >= 0.2


async def test_without_patience_the_agent_hears_at_once_and_it_is_not_its_fault(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.provider.busy = [(429, "0")]
        assert await it.ask() == 429
        assert it.trouble == "the provider answered HTTP 429"
        assert await it.ask() == 200
        assert it.trouble == "", "an answered retry makes it good"


async def test_a_body_that_the_provider_cannot_answer_is_the_agents_own_loss(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        assert await it.ask() == 200
        it.provider.busy = [(500, "0")]
        assert await it.ask() == 500
        await it.session.seal(1.0)
        assert it.trouble == ""


async def test_an_agent_that_asks_again_in_vain_is_not_graded(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        assert await it.ask() == 200
        it.provider.busy = [(500, "0")] * 2
        assert [await it.ask() for _ in range(2)] == [500, 500]
        await it.session.seal(1.0)
        assert it.trouble == "the provider answered HTTP 500"


async def test_a_pause_longer_than_patience_is_not_waited_for(tmp_path: Path) -> None:
    async with lab(tmp_path, max_wait_s=5.0) as it:
        it.provider.busy = [(429, "3600")]
        async with asyncio.timeout(4):
            assert await it.ask() == 429
        assert len(it.provider.received) == 1
        assert "429" in it.trouble


async def test_one_that_is_told_off_holds_back_the_others(tmp_path: Path) -> None:
    async with lab(tmp_path, max_wait_s=30.0) as it:
        it.provider.busy = [(429, "0.5")]
        first = asyncio.create_task(it.ask())
        while not it.provider.received:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert await it.ask() == 200
        assert time.monotonic() - began > 0.2
        assert await first == 200
        assert len(it.provider.received) == 3


async def test_a_provider_that_refuses_the_key_is_not_asked_again(tmp_path: Path) -> None:
    async with lab(tmp_path, max_wait_s=30.0, key="wrong") as it:
        assert await it.ask() == 401
        assert len(it.provider.received) == 1
        assert it.trouble == "the provider refused the key: HTTP 401"


async def test_what_the_agent_gets_wrong_is_no_trouble_of_the_provider(tmp_path: Path) -> None:
    async with lab(tmp_path, max_wait_s=30.0) as it:
        it.provider.status = 400
        assert await it.ask() == 400
        assert it.trouble == ""


async def test_requests_at_a_time_wait_for_each_other(tmp_path: Path) -> None:
    async with lab(tmp_path, max_wait_s=30.0, max_concurrent=1) as it:
        assert await asyncio.gather(*(it.ask() for _ in range(5))) == [200] * 5


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (Limits(max_calls=2), "calls"),
        (Limits(max_calls=9, max_session_tokens=40), "tokens"),
        (Limits(max_calls=9, max_prompt_tokens=200), "prompt_tokens"),
    ],
)
async def test_budgets_end_a_session(tmp_path: Path, limits: Limits, stop: str) -> None:
    async with lab(tmp_path, limits) as it:
        assert [await it.ask() for _ in range(3)][:2] == [200, 200]
        assert await it.ask() >= 400
        assert len(it.provider.received) == 2
        assert (it.session.stats.budget_stop, it.trouble) == (stop, "")


async def test_a_minute_that_is_full_is_waited_out_in_order() -> None:
    pace = RateLimiter(requests_per_minute=2, max_concurrent=9)
    now = time.monotonic()
    for _ in range(2):
        await pace.enter(now)
    pace._started_at[0] = pace._started_at[1] = now - 59.7
    order: list[int] = []

    async def one(number: int) -> None:
        await pace.enter(now + 30)
        order.append(number)

    async with asyncio.timeout(10):
        await asyncio.gather(one(0), one(1))
    assert order == [0, 1]
    with pytest.raises(WireError, match="per minute"):
        await pace.enter(time.monotonic())


async def test_who_runs_out_of_patience_leaves_the_queue_to_the_others() -> None:
    pace = RateLimiter(requests_per_minute=0, max_concurrent=1)
    await pace.enter(0)
    late = time.monotonic() + 0.1
    waiting = asyncio.create_task(pace.enter(time.monotonic() + 30))
    await asyncio.sleep(0)
    with pytest.raises(WireError, match="at a time"):
        await pace.enter(late)
    pace.leave()
    async with asyncio.timeout(5):
        await waiting


@pytest.mark.slow
async def test_a_provider_that_is_gone_is_waited_for_to_the_end_of_patience_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last try is right before the end, though the back-off would reach beyond it; then agents are
    stopped in a way that none of them retries."""
    monkeypatch.setattr(outage, "MIN_OUTAGE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with lab(tmp_path, url=url, max_wait_s=2.0) as it:
        began = time.monotonic()
        assert await it.ask() == 500
        assert 1.5 < time.monotonic() - began < 2.5
        await asyncio.sleep(max(0.0, began + 2.1 - time.monotonic()))
        assert await it.ask() == 403
        assert time.monotonic() - began < 3.0
        assert it.trouble == "the provider could not be reached"


async def test_an_answer_that_breaks_off_and_an_agent_that_leaves_are_no_outage(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.provider.breaks_after = 2
        with pytest.raises(aiohttp.ClientError):
            await it.ask(stream=True)
        assert it.backend.outage._since is None
        it.provider.breaks_after, it.provider.chunk_delay_s = 0, 0.05
        task = asyncio.create_task(it.ask(stream=True))
        async with asyncio.timeout(5):
            while len(it.provider.received) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        await it.session.seal(1.0)
        assert it.backend.outage._since is None
