"""Tensors that the first rank has and sends to the others when they are read, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insitu_train.model.parts import LazyTensors, shape_of
from insitu_train.trainer.distributed import RankLostError, Together

Described = Mapping[str, tuple[str, Sequence[int]]]
"""Type and shape of each tensor, in the order in which all ranks read them."""


def described(held: Mapping[str, Tensor]) -> Described:
    """Return what the other ranks must know of tensors; lazy ones are not read."""
    return {
        name: (str(_probe(held, name).dtype).removeprefix("torch."), shape_of(held, name)) for name in held
    }


def _probe(held: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of the same type, as little of it as possible."""
    empty = isinstance(held, LazyTensors) and shape_of(held, name)
    return held.rows(name, 0, 0) if empty and isinstance(held, LazyTensors) else held[name]


def take_over(ranks: Together, own: Any) -> Any:
    """Return the first rank's value, made of JSON; the others give None."""
    text = json.dumps(own).encode()
    size = int(ranks.broadcast(torch.tensor([len(text)])))
    first = ranks.rank == 0
    sent = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if first
        else torch.empty(size, dtype=torch.uint8)
    )
    return json.loads(bytes(ranks.broadcast(sent).tolist()))


class SentTensors(LazyTensors):
    """Every reading is a collective operation: all ranks read the same names in the same order."""

    def __init__(self, ranks: Together, about: Described, held: Mapping[str, Tensor] | None) -> None:
        """Set up. held: the tensors, on the first rank only."""
        self._ranks, self._about, self._held = ranks, about, held

    def __len__(self) -> int:
        return len(self._about)

    def __iter__(self) -> Iterator[str]:
        return iter(self._about)

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self._about[name]
        if self._held is None:
            return self._ranks.broadcast(torch.empty(tuple(shape), dtype=getattr(torch, dtype)))
        try:
            own = self._held[name].detach().to(getattr(torch, dtype))
        except Exception as error:
            # the others wait for it: nothing else can reach them
            raise RankLostError(f"read {name} for the other ranks: {error}") from error
        return self._ranks.broadcast(own)

    def shape(self, name: str) -> Sequence[int] | None:
        return self._about[name][1] if name in self._about else None

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self[name][start:stop]
