"""Running coroutines concurrently: results, errors and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from insitu.concurrency import run_all
from insitu.errors import EngineError

pytestmark = pytest.mark.slow


async def after(seconds: float, result: int | Exception) -> int:
    await asyncio.sleep(seconds)
    if isinstance(result, Exception):
        raise result
    return result


async def test_results_are_in_order() -> None:
    assert await run_all(after(0.01, 1), after(0.0, 2)) == [1, 2]
    assert await run_all() == []


async def test_the_first_error_cancels_the_others_and_leaves_the_caller_usable() -> None:
    hanging = asyncio.Event()
    with pytest.raises(EngineError, match="lost"):
        await run_all(hanging.wait(), after(0.0, ValueError("other")), after(0.0, EngineError("lost")))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(1)


async def test_cancelling_the_caller_ends_all() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    caller = asyncio.create_task(run_all(work(), work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True, True]
