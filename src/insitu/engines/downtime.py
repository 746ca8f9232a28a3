"""Time in which a call waits for an engine that is not there is not the agent's.

    with away():        around what waits: until it is mended, has new weights, has trained, or is awake again
    with watched(call): around the call; whoever keeps the agent's time stops the clock meanwhile

An engine waits deep inside `generate`, and only the gateway knows whose time goes by: the two meet here, in a
variable of the task. Callers: the engines and what mends them; gateway/deadlines.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Waiter(Protocol):
    """A call, as far as it waits. Its methods must not raise and are called in turn."""

    def went(self) -> None:
        """It waits from now on."""

    def came(self, *, cut: bool) -> None:
        """It waits no more. `cut`: it was cancelled while it waited."""


_waiter: ContextVar[Waiter | None] = ContextVar("waiter", default=None)


@contextmanager
def watched(waiter: Waiter) -> Iterator[None]:
    """`waiter` hears of every `away` inside, in this task."""
    token = _waiter.set(waiter)
    try:
        yield
    finally:
        _waiter.reset(token)


@contextmanager
def away() -> Iterator[None]:
    """The engine is not there meanwhile. One inside another is one."""
    waiter = _waiter.get()
    if waiter is None:
        yield
        return
    token = _waiter.set(None)
    waiter.went()
    cut = False
    try:
        yield
    except asyncio.CancelledError:
        cut = True
        raise
    finally:
        _waiter.reset(token)
        waiter.came(cut=cut)
