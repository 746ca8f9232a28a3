"""Attempts that only take time: log-normal latencies, a fixed number of workers, rewards by chance.

What happens to a rollout follows from the seed and its id alone, so two collectors meet the same rollouts.
A rollout is stopped at its wall limit and graded like any other, as an agent would be. Times are those of the
running loop: seconds, or virtual ones under fakes.virtual_time.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from insitu.attempt import AttemptSpec, ignore_cancelled, no_wait
from insitu.types import Ledger, Rollout, Segment, Status, Trajectory
from tests.fakes.attempts import fake_rollout

TOKENS = 4
"""Sampled tokens of a rollout: enough to carry versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How rollouts turn out."""

    seed: int = 0
    median_s: float = 1.0
    sigma: float = 1.0
    """Of the logarithm."""
    solved: float = 0.5
    failed: float = 0.0
    """Share of tries that the infrastructure fails."""


class SimulatedAttempts:
    """Implements collect.options.AttemptRunner. `version` is what a sampler would be at now."""

    def __init__(self, workers: int, chances: Chances, version: Callable[[], int]) -> None:
        self._permits = asyncio.Semaphore(workers)
        self._chances, self._version = chances, version
        self.running = 0

    async def run(
        self,
        spec: AttemptSpec,
        on_start: Callable[[], None],
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        c = self._chances
        name = f"{c.seed} {spec.rollout_id} {spec.attempt}"
        rng = np.random.default_rng(
            int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        )
        takes, luck, broken = c.median_s * float(np.exp(c.sigma * rng.normal())), rng.random(), rng.random()
        async with self._permits:
            await ready()
            on_start()
            self.running += 1
            first = self._version()
            try:
                await asyncio.sleep(min(takes, spec.task.limits.wall_s))
            except asyncio.CancelledError:
                on_cancelled(with_tokens(fake_rollout(spec, "cancelled"), first, self._version()))
                raise
            finally:
                self.running -= 1
            if broken < c.failed:
                return fake_rollout(spec, "the sandbox was lost")
            decided = fake_rollout(spec, float(luck < c.solved))
            if takes > spec.task.limits.wall_s:
                decided = replace(decided, status=Status.TRUNCATED)
            return with_tokens(decided, first, self._version())


def with_tokens(rollout: Rollout, first: int, last: int) -> Rollout:
    """The rollout with one segment: a prompt token and some that were sampled by `first` to `last`."""
    mask = np.arange(TOKENS + 1) > 0
    versions = np.concatenate([[0], np.linspace(first, last, TOKENS)]).astype(np.int32)
    segment = Segment(
        rollout_id=rollout.id,
        index=0,
        kind="sampled",
        label="append",
        ids=np.arange(TOKENS + 1, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=versions,
    )
    ledger = Ledger(captured=TOKENS, trained=TOKENS)
    return replace(rollout, trajectory=Trajectory(segments=(segment,), turns=(), ledger=ledger))
