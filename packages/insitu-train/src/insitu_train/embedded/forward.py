"""Two forward passes over per-slot key/value caches whose bits do not depend on the batch.

DECODE computes one token for each of the first n slots (idle ones compute garbage in a scratch column).
PREFILL computes keys and values of 16-token tiles; the last prompt token goes through DECODE, so there is one
path to logits. Bits are equal because every product has at least `step` rows (below that other kernels are
used; 4 on most machines, 8 on some), weighted values are summed in blocks of 128 keys in order of position,
and masked keys have weight exactly 0. batch_invariance.py checks this for rows, cache lengths, prompt cuts
and the trunk (a prefix shared by all decoding slots, read once). Where it fails, `fixed` pins the shapes.
Single-threaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from insitu_train.embedded.attention import BLOCK, Caches, DecodeAttention, add_blocks, round_up
from insitu_train.embedded.prefix_cache import TILE
from insitu_train.embedded.weights import LayerWeights, SamplerWeights

ROWS = 4
"""Slots come in multiples of this; products with fewer rows use another kernel on every machine."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """One prefill job: `ids` [TILE] (padded) for positions index * TILE .. of a slot."""

    slot: int
    index: int
    ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Input range of a decode step: `length` tokens of the first `slots` slots.

    The first `trunk` tokens are the same in all active slots and are read from slot `source` only.
    """

    slots: int
    length: int
    trunk: int = 0
    source: int = 0


class CachedForward:
    """Caches and forward passes for `rows` slots of up to `max_context` tokens."""

    def __init__(self, weights: SamplerWeights, rows: int, max_context: int, tiles: int) -> None:
        c = weights.config
        self.weights = weights
        self.rows, self.tiles = rows, tiles
        self.length = round_up(max_context, BLOCK)
        self.step = ROWS
        """Decode rows come in multiples of this; batch_invariance.py finds the least that works."""
        self.fixed = False
        """Pin every shape, for machines where shapes change the bits."""
        self.unified = False
        """DECODE gives the bits of PREFILL, as verified by batch_invariance.py."""
        self._heads, self._kv, self._hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self._caches = Caches(c, rows, self.length)
        self._attention = DecodeAttention(self._caches)
        self.keys, self.values = self._caches.keys, self._caches.values
        self.seen = self._caches.seen
        self.scratch = self.length
        """Column that no attention reads: idle rows write there."""
        width = tiles * TILE
        causal = torch.full((width, width + BLOCK), -torch.inf).triu(1)
        self._window = torch.cat([torch.zeros(width, self.length), causal], 1)
        """A run of tiles from position p sees columns length - p .. of this."""

    def show(self, slot: int, n: int) -> None:
        """Let decode rows of `slot` attend to its first n cached tokens."""
        with torch.inference_mode():
            self.seen[slot, :n] = 0.0

    def reveal(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Let decode rows of `slots` attend to one more cached token each."""
        self.seen.view(-1).index_fill_(0, torch.from_numpy(slots * self.length + positions), 0.0)

    def hide(self, slot: int) -> None:
        """Reset to idle: only column 0 is visible, which is always finite."""
        with torch.inference_mode():
            self.seen[slot] = -torch.inf
            self.seen[slot, 0] = 0.0

    def move(self, source: int, target: int, n: int) -> None:
        """Copy the first n tokens of slot `source` to slot `target`."""
        self.keys[:, target, :, :, :n] = self.keys[:, source, :, :, :n]
        self.values[:, target, :, :n] = self.values[:, source, :, :n]
        self.seen[target] = self.seen[source]

    def reset(self, weights: SamplerWeights) -> None:
        """Take new weights; the slots become empty."""
        self.weights = weights
        self._caches.clear()

    def _project(self, w: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project x [M, d] to queries and keys (complex, not yet rotated) and values.

        Shapes: [M, heads + kv_heads, hd / 2] and [M, kv_heads * hd].
        """
        m, both = x.shape[0], self._heads + self._kv
        qkv = w.qkv(_unit(x, self.weights.least))
        qk = qkv[:, : both * self._hd].view(m, both, self._hd)
        if w.qk_norm is not None:
            qk = _unit(qk, self.weights.least_head).mul_(w.qk_norm)
        return torch.view_as_complex(qk.view(m, both, self._hd // 2, 2)), qkv[:, both * self._hd :]

    def _finish(self, w: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """Compute the rest of a layer after attention: [M, d] -> [M, d]."""
        x = w.out(mixed).add_(x)
        h = w.gate_up(_unit(x, self.weights.least))
        wide = h.shape[1] // 2
        return w.down(F.silu(h[:, :wide]).mul_(h[:, wide:])).add_(x)

    def decode(self, ids: Tensor, positions: Tensor, span: DecodeSpan) -> Tensor:
        """Compute logits [n, vocab] of one token per row; row i is slot i, n >= span.slots.

        ids, positions [rows]; idle rows have position `scratch`.
        """
        w = self.weights
        m = self.rows if self.fixed else min(self.rows, round_up(span.slots, self.step))
        length = self.length if self.fixed else round_up(span.length, BLOCK)
        attend = self._attention
        attend.begin(m if self.fixed else span.slots, m, length, 0 if self.fixed else span.trunk, span.source)
        ids, positions = ids[:m], positions[:m]
        x = w.embed.index_select(0, ids)
        turns = w.turns.index_select(0, positions)
        still = w.turns[:1].expand_as(turns)  # position 0 is not rotated
        key_at, value_at = self._caches.places(m, positions)
        for i, layer in enumerate(w.layers):
            qk, v = self._project(layer, x)
            keys = attend.turn(qk, turns if layer.rotates else still)
            self._caches.write(i, key_at, value_at, keys, v)
            x = self._finish(layer, x, attend(i))
        return w.head(_unit(x, w.least))

    def prefill(self, jobs: Sequence[PrefillTile]) -> None:
        """Compute keys and values of the given tiles; earlier tiles of a slot come first in `jobs`."""
        w = self.weights
        pad = self.tiles - len(jobs) if self.fixed else 0
        ids = np.concatenate([job.ids for job in jobs] + [np.zeros(pad * TILE, np.int64)])
        starts = np.repeat(np.array([job.index * TILE for job in jobs] + [0] * pad), TILE)
        positions = torch.from_numpy(starts + np.tile(np.arange(TILE), len(jobs) + pad))
        slots = torch.from_numpy(np.repeat(np.array([job.slot for job in jobs]), TILE))
        real = len(jobs) * TILE
        runs = list(_runs(jobs, joined=not self.fixed))
        x = w.embed.index_select(0, torch.from_numpy(ids))
        turns = w.turns.index_select(0, positions)
        mixed = torch.zeros(len(ids), self._heads * self._hd)
        last = len(w.layers) - 1
        for i, layer in enumerate(w.layers):
            qk, v = self._project(layer, x)
            qk = torch.view_as_real(qk * turns if layer.rotates else qk).flatten(2)
            self.keys[i][slots, :, :, positions[:real]] = qk[:real, self._heads :]
            self.values[i][slots, :, positions[:real]] = v[:real].view(real, self._kv, self._hd)
            if i == last:
                return
            for begin, end in runs:
                rows = slice(begin * TILE, end * TILE)
                mixed[rows] = self._attend_run(i, jobs[begin], qk[rows, : self._heads])
            x = self._finish(layer, x, mixed)

    def _attend_run(self, layer: int, first: PrefillTile, q: Tensor) -> Tensor:
        """Attend consecutive tiles of one slot: q [m, heads, hd] -> [m, heads * hd]."""
        m, start = q.shape[0], first.index * TILE
        length, group = round_up(start + m, BLOCK), self._heads // self._kv
        q = q.view(m, self._kv, group, self._hd).permute(1, 2, 0, 3)
        rows = q.reshape(self._kv, group * m, self._hd)
        scores = torch.bmm(rows, self.keys[layer, first.slot, :, :, :length])
        mask = self._window[:m, self.length - start :][:, :length]
        scores.view(self._kv, group, m, length).add_(mask)
        out = torch.empty_like(rows)
        add_blocks(torch.softmax(scores, -1), self.values[layer, first.slot], length, out)
        return out.view(self._heads, m, self._hd).transpose(0, 1).reshape(m, -1)


def _unit(x: Tensor, least: Tensor) -> Tensor:
    """Return x over hypot(|x|, least) along the last axis: RMSNorm without its weight factor."""
    return x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), least)


def _runs(jobs: Sequence[PrefillTile], joined: bool) -> Iterator[tuple[int, int]]:
    """Cut jobs into (begin, end) of consecutive tiles of one slot, or singly."""
    begin = 0
    for end in range(1, len(jobs) + 1):
        follows = end < len(jobs) and (jobs[end].slot, jobs[end].index) == (
            jobs[end - 1].slot,
            jobs[end - 1].index + 1,
        )
        if not (joined and follows):
            yield begin, end
            begin = end
