"""The prefix cache: keys and values of 16-token tiles, keyed by all tokens up to and including the tile.

A tile's name is a hash chain over its prefix, so equal names mean equal content. Only keys and values whose
bits depend on nothing but earlier tokens may be stored: then a hit is bit-equal to recomputation. Bounded,
LRU. The store holds copies, so eviction never affects a running request.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from insitu.types import IntArray
from insitu_train.embedded.architecture import ModelConfig

TILE = 16
"""Tokens per tile; tiles start at multiples of it."""


def tile_names(ids: IntArray, parent: bytes = b"") -> list[bytes]:
    """Return names of the tiles that cover `ids`, after tile `parent`; the last may be partial."""
    names: list[bytes] = []
    name = parent
    raw = np.ascontiguousarray(ids, dtype="<i4").tobytes()
    for start in range(0, len(raw), TILE * 4):
        name = hashlib.blake2b(raw[start : start + TILE * 4], digest_size=16, key=name).digest()
        names.append(name)
    return names


class PrefixCache:
    """Stores of `capacity` tiles: keys [layers, kv_heads, head_dim, TILE], values [.., TILE, head_dim]."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        layers, heads, hd = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self._keys = torch.zeros(capacity, layers, heads, hd, TILE)
        self._values = torch.zeros(capacity, layers, heads, TILE, hd)
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(capacity))
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        """Remove everything (new weights)."""
        self._free.extend(self._places.values())
        self._places.clear()

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Return the places of the longest run of cached tiles from the start of `names`."""
        found: list[int] = []
        for name in names:
            place = self._places.get(name)
            if place is None:
                break
            found.append(place)
        return found

    def touch(self, names: Sequence[bytes]) -> None:
        """Make the tiles of a prompt the most recent, its start most of all."""
        for name in reversed(names):
            if name in self._places:
                self._places.move_to_end(name)

    def load(self, places: Sequence[int], keys: Tensor, values: Tensor, start: int) -> None:
        """Copy tiles into one slot's keys [layers, heads, hd, cap] and values, from token `start` on."""
        index = torch.tensor(places)
        n, stop = len(places), start + len(places) * TILE
        k, v = self._keys.index_select(0, index), self._values.index_select(0, index)
        shape = keys.shape[:3]
        keys[..., start:stop].view(*shape, n, TILE).copy_(k.permute(1, 2, 3, 0, 4))
        values[:, :, start:stop].view(*shape[:2], n, TILE, shape[2]).copy_(v.permute(1, 2, 0, 3, 4))

    def store(self, name: bytes, keys: Tensor, values: Tensor) -> None:
        """Keep one tile: keys [layers, heads, hd, TILE], values [layers, heads, TILE, hd]."""
        if name in self._places:
            return
        if self._free:
            place = self._free.pop()
        elif self._places:
            _, place = self._places.popitem(last=False)
            self.evicted += 1
        else:
            return
        self._keys[place].copy_(keys)
        self._values[place].copy_(values)
        self._places[name] = place
