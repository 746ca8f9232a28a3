"""What names the weights that a learner holds: the checksum that a step's record, an engine's receipt and the
start of a run are compared by.

It is asked for at every step. Weights that are never trained (the model under adapters) are therefore hashed
once and stand in it as that hash; of the others every value is read. Called by main.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from whet.engine.embedded_weights import checksum
from whet.train.policy.base import Policy


@dataclass(frozen=True, slots=True)
class _Part:
    """Some parameters of a model."""

    named: tuple[tuple[str, nn.Parameter], ...]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.named


class Fingerprint:
    """Of one model, whose frozen weights stay as they are."""

    def __init__(self, model: Policy) -> None:
        named = tuple(model.named_parameters())
        frozen = tuple((n, p) for n, p in named if not p.requires_grad)
        self._trained = _Part(tuple((n, p) for n, p in named if p.requires_grad))
        self._frozen = checksum(_Part(frozen)) if frozen else ""

    def now(self) -> str:
        """Hex SHA-256: that of `checksum` where all weights are trained, else of both parts' own."""
        trained = checksum(self._trained)
        if not self._frozen:
            return trained
        return hashlib.sha256(f"{self._frozen} {trained}".encode()).hexdigest()
