"""Run coroutines concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from insitu.errors import InsituError

T = TypeVar("T")


async def run_all(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently and return their results in order; the first error cancels the others.

    Raises that error, an InsituError before another one. Returns when all of them have ended.
    """
    # Not a TaskGroup: before Python 3.13 its failure leaves the calling task marked as being cancelled
    # (`cancelling() > 0`), which breaks every later asyncio.timeout of the task.
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, InsituError)), errors[0])
    return [task.result() for task in tasks]
