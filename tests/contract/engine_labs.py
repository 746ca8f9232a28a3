"""The engines that the contract runs over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.config import WARM_START
from insitu.engines.base import Engine
from insitu.engines.http import HttpOptions
from insitu.engines.sglang import open_sglang
from insitu.engines.vllm import open_vllm
from insitu.types import IntArray, RequestKey, SamplingParams
from insitu_bridges.external import ExternalEngine, serve_external
from insitu_train.demo.scripted import ScriptedEngine
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from tests.fakes.sampler import FakeSampler, Job
from tests.fakes.sglang import serve_sglang
from tests.fakes.vllm import serve_vllm

VOCAB = 448
"""Of the warm start; the fakes take the same."""


Open = Callable[[], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def embedded() -> AsyncIterator[Engine]:
    async with Learner.start(LearnerSpec(model=WARM_START)) as learner:
        yield learner.engine


@asynccontextmanager
async def scripted() -> AsyncIterator[Engine]:
    def policy(ids: IntArray, key: RequestKey) -> IntArray:
        return np.random.default_rng([key.turn, len(key.rollout_id)]).integers(50, VOCAB, size=64)

    renderer = template_renderer(read_folder(Path(WARM_START)))
    engine = ScriptedEngine(renderer, policy, sampled=True, max_context_tokens=2048)
    yield engine


@asynccontextmanager
async def fake_vllm(scale_out: bool = True) -> AsyncIterator[Engine]:
    async with (
        serve_vllm(VOCAB, scale_out=scale_out) as fake,
        open_vllm(HttpOptions(url=fake.url, call_deadline_s=20.0)) as engine,
    ):
        yield engine


@asynccontextmanager
async def real_vllm(url: str) -> AsyncIterator[Engine]:
    async with open_vllm(HttpOptions(url=url, call_deadline_s=120.0)) as engine:
        # The first requests at a server take long.
        await engine.generate(
            np.array([1, 40], dtype=np.int32),
            SamplingParams(max_tokens=2),
            RequestKey(seed=0, rollout_id="w", turn=0),
        )
        yield engine


@asynccontextmanager
async def fake_sglang() -> AsyncIterator[Engine]:
    async with (
        serve_sglang(VOCAB) as fake,
        open_sglang(HttpOptions(url=fake.url, call_deadline_s=20.0)) as engine,
    ):
        yield engine


class Trainer:
    """A trainer that samples the fakes' model of chance for an external engine, over HTTP."""

    def __init__(self, url: str, secret: str) -> None:
        self.url, self.head = url, {"Authorization": f"Bearer {secret}"}
        self.sampler = FakeSampler(VOCAB, label="0")

    async def call(self, http: aiohttp.ClientSession, route: str, body: object) -> tuple[int, Any]:
        async with http.post(f"{self.url}/v1/{route}", json=body, headers=self.head) as answer:
            return answer.status, await answer.json()

    async def run(self) -> None:
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            while True:
                status, said = await self.call(http, "take", {"limit": 16, "wait_s": 5})
                assert status == 200
                for request in said["requests"]:
                    group.create_task(self.answer(http, request))

    async def answer(self, http: aiohttp.ClientSession, request: dict[str, Any]) -> None:
        name = request["name"]
        if max(request["ids"]) >= VOCAB:
            await self.call(http, "fail", {"name": name, "why": "an id outside the vocabulary"})
            return
        job = Job(
            name=name,
            prompt=request["ids"],
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            seed=request["seed"],
            stop_ids=frozenset(request["stop_ids"]),
        )
        await self.sampler.run(job)
        body = {"name": name, "ids": job.ids, "logprobs": job.processed, "finish": job.finish}
        status, said = await self.call(http, "deliver", body)
        assert status == 200 or "was given up" in said["error"], said


@asynccontextmanager
async def external() -> AsyncIterator[Engine]:
    engine = ExternalEngine(max_context_tokens=4096, call_deadline_s=20.0)
    async with serve_external(engine, "127.0.0.1", 0, "trainer's secret") as url:
        trainer = asyncio.create_task(Trainer(url, "trainer's secret").run())
        yield engine
        trainer.cancel()
        await asyncio.wait([trainer])


ENGINES: dict[str, Open] = {
    "embedded": embedded,
    "vllm-generate-fake": fake_vllm,
    "vllm-completions-fake": lambda: fake_vllm(scale_out=False),
    "sglang-fake": fake_sglang,
    "external": external,
}
