"""The store of keys and values: pages of 128 tokens, shared by requests and kept as a prefix cache.

A tile is 16 tokens of a page, named by a hash chain over all tokens up to its end, so equal names mean equal
content. A complete page is shared as it is; the tiles of an incomplete one are copied. Pages without a user
stay until their place is needed, the least recent first. Pages of one user lie at low places and pages of
several at high ones, so that attention reads each kind as one piece of memory; a page may move for that.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from insitu.errors import EngineError
from insitu.types import IntArray
from insitu_train.embedded.architecture import ModelConfig

TILE = 16
"""Tokens per tile; tiles start at multiples of it."""
PAGE = 128
"""Tokens per page."""
TILES = PAGE // TILE
HIDDEN = -1e30
"""Added to the score of a token that is not seen: its weight is exactly 0, also where no token is seen."""


def tile_names(ids: IntArray, parent: bytes = b"") -> list[bytes]:
    """Return names of the tiles that cover `ids`, after tile `parent`; the last may be partial."""
    names: list[bytes] = []
    name = parent
    raw = np.ascontiguousarray(ids, dtype="<i4").tobytes()
    for start in range(0, len(raw), TILE * 4):
        name = hashlib.blake2b(raw[start : start + TILE * 4], digest_size=16, key=name).digest()
        names.append(name)
    return names


class Page:
    """One page; its place may change."""

    __slots__ = ("at", "names", "shared", "users")

    def __init__(self, at: int) -> None:
        self.at = at
        self.users = 1
        self.shared = False
        """Several requests used it at once; until none does."""
        self.names: list[bytes] = []
        """Names under which its tiles are found."""


class PagePool:
    """keys, values [layers, places + 1, kv_heads, PAGE, head_dim]; the last place is scratch memory.

    `seen` [places + 1, PAGE] is 0 for tokens that their only user attends to, else HIDDEN. Memory is taken
    from the system when a place is used for the first time.
    """

    def __init__(
        self, c: ModelConfig, places: int, layers: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (
            c.num_hidden_layers if layers is None else layers,
            places + 1,
            c.num_key_value_heads,
            PAGE,
            c.head_dim,
        )
        # numpy leaves pages of zeros to the system, torch writes them
        kind = np.float32 if dtype == torch.float32 else np.int16
        self.keys, self.values = (torch.from_numpy(np.zeros(shape, kind)).view(dtype) for _ in range(2))
        self.seen = torch.full((places + 1, PAGE), HIDDEN, dtype=dtype)
        self.scratch = places
        self.kv_heads, self.head_dim = c.num_key_value_heads, c.head_dim
        self.evicted = 0
        """Pages given up for others."""
        self.moves = 0
        """Pages moved so far: a layout made before the last one does not hold."""
        self._held: list[Page | None] = [None] * places
        self._unused: OrderedDict[Page, None] = OrderedDict()
        self._named: dict[bytes, tuple[Page, int]] = {}
        self._flat = [
            (k.view(-1, c.head_dim), v.view(-1, c.head_dim))
            for k, v in zip(self.keys, self.values, strict=True)
        ]

    def __len__(self) -> int:
        """Return the number of tiles that can be found."""
        return len(self._named)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return sum(page is not None and page.users > 0 for page in self._held)

    @property
    def nbytes(self) -> int:
        """Bytes when all places are in use."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self) -> None:
        """Forget everything (new weights); no request may run."""
        evicted = self.evicted
        while self._unused:
            self._give_up(next(iter(self._unused)))
        self.evicted = evicted

    def take(self) -> Page:
        """Return an empty page for one user. Raises EngineError when all are in use."""
        at = self._lowest()
        if self._held[at] is not None:
            free = next((i for i in range(len(self._held) - 1, at, -1) if self._held[i] is None), None)
            if free is None:
                oldest = next(iter(self._unused))
                self._give_up(oldest)
                free = oldest.at
            self._swap(at, free)
        page = self._held[at] = Page(at)
        self.keys[:, at], self.values[:, at], self.seen[at] = 0.0, 0.0, HIDDEN
        return page

    def share(self, page: Page) -> Page:
        """Add a user to a complete page."""
        page.users += 1
        self._unused.pop(page, None)
        if page.users == 1:
            self._swap(page.at, min(page.at, self._lowest(page.at)))
        elif not page.shared:
            page.shared = True
            self._swap(page.at, max(page.at, self._highest(page.at)))
        return page

    def release(self, pages: Iterable[Page]) -> None:
        """Remove a user; the first of `pages` is kept longest."""
        for page in reversed(list(pages)):
            page.users -= 1
            if not page.users:
                page.shared = False
                if page.names:
                    self._unused[page] = None
                else:
                    self._held[page.at] = None

    def find(self, name: bytes) -> Page | None:
        """Return the page that holds a tile."""
        found = self._named.get(name)
        return None if found is None else found[0]

    def name(self, page: Page, tile: int, name: bytes) -> None:
        """Let a tile of a page be found, unless another page has the same."""
        if name not in self._named:
            self._named[name] = page, tile
            page.names.append(name)

    def copy(self, source: Page, target: Page, tile: int) -> None:
        cut = slice(tile * TILE, (tile + 1) * TILE)
        for held in (self.keys, self.values):
            held[:, target.at, :, cut] = held[:, source.at, :, cut]
        if source in self._unused:
            self._unused.move_to_end(source)

    def show(self, pages: Sequence[Page], n: int) -> None:
        """Let the only user of each page attend to the first n tokens of a request."""
        for index, page in enumerate(pages):
            self.seen[page.at, : max(0, n - index * PAGE)] = 0.0

    def rows(self, places: Tensor, offsets: Tensor) -> Tensor:
        """Return where `write` puts tokens, [n * kv_heads], by places and offsets [n]."""
        heads = torch.arange(self.kv_heads)
        return ((places[:, None] * self.kv_heads + heads) * PAGE + offsets[:, None]).view(-1)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n * kv_heads, head_dim] at `rows`."""
        flat_keys, flat_values = self._flat[layer]
        flat_keys.index_copy_(0, rows, keys)
        flat_values.index_copy_(0, rows, values)

    def compact(self) -> None:
        """Move pages together when the pieces that attention reads have become half empty."""
        single = sorted(p.at for p in self._held if p is not None and p.users and not p.shared)
        while single and single[-1] + 1 > 2 * len(single) + 8 and (free := self._lowest()) < single[-1]:
            self._swap(single.pop(), free)
        shared = sorted(p.at for p in self._held if p is not None and p.users and p.shared)
        while shared and len(self._held) - shared[0] > 2 * len(shared) + 8:
            if (free := self._highest()) <= shared[0]:
                break
            self._swap(shared.pop(0), free)

    def _lowest(self, own: int = -1) -> int:
        """Return the lowest place that no user holds, or `own`. Raises EngineError when there is none."""
        for at, page in enumerate(self._held):
            if page is None or not page.users or at == own:
                return at
        raise EngineError(f"all {len(self._held)} pages of keys and values are in use")

    def _highest(self, own: int = -1) -> int:
        places = range(len(self._held) - 1, -1, -1)
        return next(
            (at for at in places if (page := self._held[at]) is None or not page.users or at == own), own
        )

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.moves += 1
        first, second = self._held[a], self._held[b]
        for held in (self.keys, self.values, self.seen[None]):
            kept = held[:, b].clone() if second is not None else None
            if first is not None:
                held[:, b] = held[:, a]
            if kept is not None:
                held[:, a] = kept
        self._held[a], self._held[b] = second, first
        if first is not None:
            first.at = b
        if second is not None:
            second.at = a

    def _give_up(self, page: Page) -> None:
        for name in page.names:
            del self._named[name]
        del self._unused[page]
        self._held[page.at] = None
        self.evicted += 1
