"""A gateway before an engine that is a server: what cannot be trusted is an error here and tokens nowhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from insitu.chat.template import TemplateRenderer
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.token_backend import MAX_OUTAGES, TokenBackend
from insitu.types import Limits
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import chance_folder

ASK = {"messages": [{"role": "user", "content": "Fix f."}], "max_tokens": 24}


class Lab:
    """A fake vLLM, the engine before it, a gateway and one session."""

    fake: FakeVllm
    engine: VllmEngine
    session: Session
    http: aiohttp.ClientSession
    url: str

    async def post(self, body: object = ASK) -> tuple[int, Any]:
        async with self.http.post(self.url, json=body) as answer:
            return answer.status, json.loads(await answer.read())


@asynccontextmanager
async def lab(renderer: TemplateRenderer, **options: Any) -> AsyncIterator[Lab]:
    it = Lab()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        it.fake = await enter(serve_vllm(renderer.vocab_size, **options))
        it.engine = await enter(open_vllm(HttpOptions(url=it.fake.url, call_deadline_s=10.0, retries=0)))
        gateway = await enter(
            Gateway(TokenBackend(it.engine, renderer), GatewayConfig(disconnect_grace_s=0.05))
        )
        listener = await enter(gateway.listen_tcp())
        limits = Limits(max_context_tokens=4096, max_call_tokens=64)
        it.session = gateway.open_session("r/0", seed=7, limits=limits)
        it.url = f"{listener.origin}/s/{it.session.public_id}/v1/chat/completions"
        it.http = await enter(aiohttp.ClientSession(headers={"Authorization": f"Bearer {it.session.secret}"}))
        yield it


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "short": lambda a: a["choices"][0]["logprobs"]["content"].pop(),
    "missing": lambda a: a["choices"][0].update(logprobs=None),
    "null": lambda a: a["choices"][0]["logprobs"]["content"][0].update(logprob=None),
    "sentinel": lambda a: a["choices"][0]["logprobs"]["content"][0].update(logprob=-9999.0),
    "other prompt": lambda a: a["prompt_token_ids"].pop(),
    "unknown weights": lambda a: a["choices"][0]["weight_versions"][0].update(version="default"),
    "newer weights": lambda a: a["choices"][0]["weight_versions"][0].update(version="9"),
}


@pytest.mark.case(45)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_reply_that_cannot_be_trusted_ends_the_session(renderer: TemplateRenderer, name: str) -> None:
    def corrupt(answer: dict[str, Any]) -> object:
        FAULTS[name](answer)
        return answer

    async with lab(renderer) as it:
        status, first = await it.post()
        assert status == 200
        kept = first["usage"]["completion_tokens"]
        it.fake.corrupt = corrupt
        status, said = await it.post()
        assert status == 500
        assert said["error"]["type"] == "server_error"
        assert "logprob" not in json.dumps(said)
        assert it.session.stats.infra_error
        trajectory = await it.session.seal(1.0)
        assert trajectory.ledger.balanced
        # Nothing of the broken reply is held, and nothing of the good one was lost.
        assert trajectory.ledger.captured == kept
        assert [len(turn.ids) for turn in trajectory.turns] == [kept]


@pytest.mark.case(46)
async def test_a_restart_in_the_middle_of_a_call(renderer: TemplateRenderer, tmp_path: Path) -> None:
    async with lab(renderer, token_delay_s=0.02) as it:
        chance_folder(tmp_path, "one")
        await it.engine.load(tmp_path, 3)
        call = asyncio.create_task(it.post())
        await until(lambda: it.fake.sampler.jobs)
        it.fake.restart()
        assert (await call)[0] == 500
        assert "closed the connection" in it.session.stats.infra_error
        # The agent comes again; the server's weights are no longer version 3.
        assert (await it.post())[0] == 500
        assert (await it.post())[0] == 403
        trajectory = await it.session.seal(1.0)
        assert trajectory.ledger.captured == 0


@pytest.mark.case(46)
async def test_a_reload_in_the_middle_of_a_call(renderer: TemplateRenderer, tmp_path: Path) -> None:
    async with lab(renderer, token_delay_s=0.02) as it:
        chance_folder(tmp_path, "one")
        call = asyncio.create_task(it.post())
        await until(lambda: it.fake.sampler.jobs and len(it.fake.sampler.jobs[0].ids) > 3)
        await it.engine.load(tmp_path, 1, mode="keep")
        assert (await call)[0] == 200
        trajectory = await it.session.seal(1.0)
        assert trajectory.ledger.balanced
        (segment,) = trajectory.segments
        versions = segment.versions[np.flatnonzero(segment.mask)].tolist()
        assert versions == [int(label) for label in it.fake.sampler.received[-1].labels]
        assert set(versions) == {0, 1}


@pytest.mark.case(42)
async def test_a_client_that_leaves_aborts_at_the_server(renderer: TemplateRenderer) -> None:
    async with lab(renderer, token_delay_s=0.05) as it:
        call = asyncio.create_task(it.post())
        await until(lambda: it.fake.sampler.jobs)
        call.cancel()
        await until(lambda: not it.fake.sampler.jobs)
        assert it.fake.sampler.aborted
        trajectory = await it.session.seal(1.0)
        assert trajectory.ledger.captured == 0
        assert it.session.stats.aborted == 1


@pytest.mark.case(46)
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_does_not_end_the_session(renderer: TemplateRenderer, status: int) -> None:
    async with lab(renderer) as it:
        it.fake.busy, it.fake.busy_status = 1, status
        assert (await it.post())[0] == 500
        assert (await it.post())[0] == 200
        assert not it.session.stats.infra_error
        trajectory = await it.session.seal(1.0)
        assert trajectory.ledger.captured == trajectory.ledger.trained > 0


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_that_goes_on_refusing_ends_the_session(
    renderer: TemplateRenderer, status: int
) -> None:
    async with lab(renderer) as it:
        it.fake.busy, it.fake.busy_status = 100, status
        statuses = [(await it.post())[0] for _ in range(MAX_OUTAGES + 2)]
        assert statuses == [500] * MAX_OUTAGES + [403] * 2
        assert f"HTTP {status}" in it.session.stats.infra_error
        assert it.fake.busy == 100 - MAX_OUTAGES
