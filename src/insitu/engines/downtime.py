"""Report engine downtime to the call that waits, so that it does not count against the agent.

    with engine_down():        around a wait for a restart, new weights, a training step or a wake-up
    with on_downtime(call):    around the call; its deadline is paused meanwhile

An engine waits deep inside `generate`, and only the gateway has the deadline: they are connected by a context
variable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Waiter(Protocol):
    """Callbacks of a call that waits; must not raise, called in turn."""

    def on_wait(self) -> None:
        """Handle the start of the downtime."""

    def on_resume(self, *, cut: bool) -> None:
        """Handle the end of the downtime; `cut`: the call was cancelled while it waited."""


_waiter: ContextVar[Waiter | None] = ContextVar("waiter", default=None)


@contextmanager
def on_downtime(waiter: Waiter) -> Iterator[None]:
    """Call `waiter` for each `engine_down` inside, in this task."""
    token = _waiter.set(waiter)
    try:
        yield
    finally:
        _waiter.reset(token)


def current_waiter() -> Waiter | None:
    """Return the waiter of this task's call, for an engine whose downtime another process reports."""
    return _waiter.get()


@contextmanager
def engine_down() -> Iterator[None]:
    """Mark the engine as down inside the context; nested uses count once."""
    waiter = _waiter.get()
    if waiter is None:
        yield
        return
    token = _waiter.set(None)
    waiter.on_wait()
    cut = False
    try:
        yield
    except asyncio.CancelledError:
        cut = True
        raise
    finally:
        _waiter.reset(token)
        waiter.on_resume(cut=cut)
