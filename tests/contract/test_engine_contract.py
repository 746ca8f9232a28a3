"""The engine contract, over every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_labs import ENGINES, VOCAB, real_vllm, scripted

from insitu.engines.base import Engine
from insitu_lab.testing import EngineContract

pytestmark = pytest.mark.slow

REAL = pytest.param("vllm", marks=pytest.mark.full)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*ENGINES, REAL])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    if request.param == "vllm":
        opening = real_vllm(request.getfixturevalue("real_vllm").url)
    else:
        opening = ENGINES[request.param]()
    async with opening as engine:
        yield engine


class TestEngines(EngineContract):
    """Engines that sample."""

    vocab_size = VOCAB


class TestScriptedEngine(EngineContract):
    """The engine of conformance and demonstrations."""

    vocab_size = VOCAB
    scripted = True

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self) -> AsyncIterator[Engine]:
        async with scripted() as engine:
            yield engine
