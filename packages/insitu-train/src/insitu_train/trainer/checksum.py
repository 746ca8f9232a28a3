"""The checksum of the trainer's weights, which names them in the record of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from insitu_train.embedded.weights import checksum_of, combined
from insitu_train.model.base import Policy
from insitu_train.trainer.distributed import Ranks
from insitu_train.trainer.owners import digests_of_all


class WeightChecksum:
    """Checksum of one model whose frozen weights do not change."""

    def __init__(self, model: Policy, ranks: Ranks | None = None) -> None:
        """Set up. ranks: sharded ones compute it together, so that none holds a whole model."""
        self._model, self._ranks = model, ranks or Ranks()
        self._never = frozenset(n for n, p in model.named_parameters() if not p.requires_grad)
        self._frozen = ""

    def now(self) -> str:
        """Return the hex SHA-256: `checksum` where all weights are trained, else over both parts' own."""
        names = {name for name, _ in self._model.named_parameters()}
        if self._never and not self._frozen:
            self._frozen = self._of(self._never)
        trained = self._of(names - self._never)
        if not self._frozen:
            return trained
        return hashlib.sha256(f"{self._frozen} {trained}".encode()).hexdigest()

    def _of(self, names: Iterable[str]) -> str:
        held = {n: p.detach() for n, p in self._model.named_parameters() if n in set(names)}
        if not self._ranks.sharded:
            return checksum_of(held)
        sums = self._ranks.attempt(lambda: digests_of_all(self._ranks, held, held))
        return combined({name: tuple(tensor.shape) for name, tensor in held.items()}, sums)
