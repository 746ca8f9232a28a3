"""Pauses between retries: exponential backoff with jitter, and the pause that a server asks for."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_random = random.Random()


def backoff_s(failures: int, first_s: float, max_s: float = 60.0) -> float:
    """Return the pause after so many failures in a row: doubled each time, up to `max_s`, with jitter.

    At least half of the pause remains, so that callers which failed together do not come back together.
    """
    return min(max_s, first_s * 2.0 ** min(failures - 1, 16)) * _random.uniform(0.5, 1.0)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a busy server asks for in `Retry-After`, None without a valid value."""
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        seconds = _until(value)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


async def retry(
    call: Callable[[], Awaitable[T]],
    retryable: Callable[[Exception], bool],
    *,
    attempts: int,
    first_s: float,
    name: str,
) -> T:
    """Return the first successful result of `call`; raise its last error after so many attempts."""
    for failures in range(1, attempts):
        try:
            return await call()
        except Exception as error:
            if not retryable(error):
                raise
            log.warning("retry call=%s failures=%d cause=%s", name, failures, error)
        await asyncio.sleep(backoff_s(failures, first_s))
    return await call()


def _until(date: str) -> float:
    """Return the seconds until an HTTP date; NaN for any other text."""
    try:
        return max(0.0, email.utils.parsedate_to_datetime(date).timestamp() - time.time())
    except ValueError:
        return math.nan
