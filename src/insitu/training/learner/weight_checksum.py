"""What names the weights that a learner holds: the checksum that a step's record, an engine's receipt and the
start of a run are compared by.

It is asked for at every step. Weights that are never trained (the model under adapters) are therefore hashed
once and stand in it as that hash; of the others every value is read. Called by main.py.
"""

from __future__ import annotations

import hashlib

from insitu.engines.embedded.weights import checksum_of
from insitu.training.model.base import Policy
from insitu.training.model.hf import HfPolicy


class WeightChecksum:
    """Of one model, whose frozen weights stay as they are."""

    def __init__(self, model: Policy) -> None:
        self._model = model
        self._never = frozenset(n for n, p in model.named_parameters() if not p.requires_grad)
        self._frozen = ""

    def now(self) -> str:
        """Hex SHA-256: that of `checksum` where all weights are trained, else of both parts' own. Sharded
        weights must have been gathered."""
        model = self._model
        named = model.readable() if isinstance(model, HfPolicy) else dict(model.named_parameters())
        if self._never and not self._frozen:
            self._frozen = checksum_of({n: named[n] for n in self._never})
        trained = checksum_of({n: t for n, t in named.items() if n not in self._never})
        if not self._frozen:
            return trained
        return hashlib.sha256(f"{self._frozen} {trained}".encode()).hexdigest()
