"""Publishing weights: how an engine comes to sample with a new policy version, and the proof that it does.

The controller's side; never imports torch. A version is published when its step is durable, not before: what
was sampled with weights that a crash takes back would have no version. Called by the training loops after
`Learner.step` and once at the start of a run, before anything is sampled.
"""

from __future__ import annotations

from typing import Protocol

from whet.engine.base import Receipt
from whet.train.client import Learner


class Publisher(Protocol):
    """Brings the trainer's current weights into the engine."""

    async def publish(self, version: int) -> Receipt:
        """Return when the engine samples with them; the receipt is for `version`, the trainer's.

        Every wait has a deadline. Raises EngineError or TrainError when the engine does not hold them; then
        nothing may be sampled before a later publication succeeds.
        """


class InLearner:
    """The embedded engine, in the trainer's own process."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def publish(self, version: int) -> Receipt:
        return await self._learner.publish(version)
