"""The checksum of a learner's weights, for step records, engine receipts and the start of a run.

Computed at every step; frozen weights (the model under adapters) are hashed once.
"""

from __future__ import annotations

import hashlib

from insitu.engines.embedded.weights import checksum_of
from insitu.training.model.base import Policy
from insitu.training.model.hf import HfPolicy


class WeightChecksum:
    """Checksum of one model whose frozen weights do not change."""

    def __init__(self, model: Policy) -> None:
        self._model = model
        self._never = frozenset(n for n, p in model.named_parameters() if not p.requires_grad)
        self._frozen = ""

    def now(self) -> str:
        """Return the hex SHA-256: `checksum` where all weights are trained, else over both parts' own.

        Sharded weights must be gathered.
        """
        model = self._model
        named = model.readable() if isinstance(model, HfPolicy) else dict(model.named_parameters())
        if self._never and not self._frozen:
            self._frozen = checksum_of({n: named[n] for n in self._never})
        trained = checksum_of({n: t for n, t in named.items() if n not in self._never})
        if not self._frozen:
            return trained
        return hashlib.sha256(f"{self._frozen} {trained}".encode()).hexdigest()
