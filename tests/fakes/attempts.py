"""Attempts without sandbox, agent or engine: a function says how each attempt ends.

Stands in for rollout.Attempts where only the collector or the loop is under test. Keeps every spec it was
given and how many ran at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from insitu.attempt import AttemptSpec, ignore_cancelled, no_wait
from insitu.types import Ledger, Rollout, Status, Timings, Trajectory

Fate = Callable[[AttemptSpec], float | str]
"""A reward, or the one-line cause of an infrastructure failure."""


class FakeAttempts:
    """Implements collect.options.AttemptRunner."""

    def __init__(self, fate: Fate, *, delay_s: Callable[[AttemptSpec], float] = lambda spec: 0.0) -> None:
        self.specs: list[AttemptSpec] = []
        self.running = 0
        self.most_running = 0
        self._fate, self._delay_s = fate, delay_s

    async def run(
        self,
        spec: AttemptSpec,
        on_start: Callable[[], None],
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        self.specs.append(spec)
        await ready()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        on_start()
        try:
            await asyncio.sleep(self._delay_s(spec))
            return fake_rollout(spec, self._fate(spec))
        except asyncio.CancelledError:
            on_cancelled(fake_rollout(spec, "cancelled"))
            raise
        finally:
            self.running -= 1


def fake_rollout(spec: AttemptSpec, fate: float | str) -> Rollout:
    """A decided rollout without tokens."""
    failed = isinstance(fate, str)
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        category=spec.task.category,
        status=Status.INFRA_FAILED if failed else Status.OK,
        reward=None if isinstance(fate, str) else fate,
        trajectory=Trajectory(segments=(), turns=(), ledger=Ledger()),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
        attempt=spec.attempt,
        error=fate if isinstance(fate, str) else "",
    )
