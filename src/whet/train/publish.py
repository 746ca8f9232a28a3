"""Publishing weights: how an engine comes to sample with a new policy version, and the proof that it does."""

from __future__ import annotations

from typing import Protocol

from whet.engine.base import Receipt
from whet.engine.embedded_core import EmbeddedCore


class WeightPublisher(Protocol):
    """Brings the trainer's current weights into an engine."""

    def publish(self, version: int) -> Receipt:
        """Return when the engine samples with them: version and checksum over all tensors in name order.

        Raises EngineError when it does not.
        """


class InProcess:
    """The embedded engine in the trainer's own process: it reads the trainer's tensors.

    The core lays the weights out anew and forgets its prefix cache. Nothing may be running there.
    """

    def __init__(self, core: EmbeddedCore) -> None:
        self._core = core

    def publish(self, version: int) -> Receipt:
        return self._core.refresh(version)
