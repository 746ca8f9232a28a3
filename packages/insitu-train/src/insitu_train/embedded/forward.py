"""Two forward passes over paged keys and values whose bits do not depend on the batch.

DECODE computes one token for each row. PREFILL computes keys and values of 16-token tiles; the last prompt
token goes through DECODE, so there is one path to logits. Bits are equal because every product has at least
`step` rows (below that other kernels are used; 4 on most machines, 8 on some) and attention is computed page
by page (attention.py). batch_invariance.py checks this for rows, pages, prompt cuts and shared pages. Where
it fails, `fixed` pins the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from insitu_train.embedded.attention import (
    Layout,
    causal_mask,
    decode_attention,
    prefill_attention,
    round_up,
)
from insitu_train.embedded.pages import PAGE, TILE, TILES, Page, PagePool
from insitu_train.embedded.weights import LayerWeights, SamplerWeights

ROWS = 4
"""Rows come in multiples of this; products with fewer rows use another kernel on every machine."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTile:
    """One prefill job: `ids` [TILE] (padded) for positions index * TILE .. of a request."""

    pages: Sequence[Page]
    """Those of the request, this tile's included."""
    index: int
    ids: npt.NDArray[np.int64]


class CachedForward:
    """Forward passes over a pool for up to `rows` rows and `tiles` tiles."""

    def __init__(self, weights: SamplerWeights, pool: PagePool, rows: int, tiles: int) -> None:
        c = weights.config
        self.weights, self.pool = weights, pool
        self.rows, self.tiles = rows, tiles
        self.step = ROWS
        """Decode rows come in multiples of this; batch_invariance.py finds the least that works."""
        self.fixed = False
        """Pin every shape, for machines where shapes change the bits."""
        self.unified = False
        """DECODE gives the bits of PREFILL, as verified by batch_invariance.py."""
        self._heads, self._kv, self._hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def layout(self, tables: Sequence[Sequence[Page]]) -> Layout:
        """Return the layout of a decode pass whose rows attend to the pages of `tables`."""
        rows = self.rows if self.fixed else min(self.rows, round_up(len(tables), self.step))
        return Layout.of(tables, rows, self.pool)

    def _project(self, w: LayerWeights, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [m, d] to queries [m, kv, group, hd], rotated, and keys and values [m * kv, hd]."""
        m, both = x.shape[0], self._heads + self._kv
        qkv = w.qkv(self._normed(x, w.before))
        qk = qkv[:, : both * self._hd].float().view(m, both, self._hd)
        if w.qk_norm is not None:
            qk = _unit(qk, self.weights.least_head).mul_(w.qk_norm)
        if w.rotates:
            pairs = torch.view_as_complex(qk.view(m, both, self._hd // 2, 2))
            qk = torch.view_as_real(pairs * turns).flatten(2)
        qk = qk.to(x.dtype)
        q = qk[:, : self._heads].view(m, self._kv, -1, self._hd)
        keys = qk[:, self._heads :].reshape(-1, self._hd)
        return q, keys, qkv[:, both * self._hd :].reshape(-1, self._hd)

    def _normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """Return RMSNorm of x, without its weights where `gain` is None."""
        if gain is None:
            return _unit(x, self.weights.least)
        return (_unit(x.float(), self.weights.least) * gain).to(x.dtype)

    def _finish(self, w: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """Compute the rest of a layer after attention: [m, d] -> [m, d]."""
        x = w.out(mixed).add_(x)
        h = w.gate_up(self._normed(x, w.between))
        wide = h.shape[1] // 2
        return w.down(F.silu(h[:, :wide]).mul_(h[:, wide:])).add_(x)

    def decode(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], layout: Layout) -> Tensor:
        """Compute logits [rows, vocab] of one token per row and let the row attend to it from now on.

        ids, positions [n], n <= rows; the logits of further rows mean nothing.
        """
        w, n, m = self.weights, len(ids), layout.rows
        where = np.zeros((2, m), np.int64)
        where[:, :n] = ids, positions
        tokens, at = torch.from_numpy(where)
        offsets = at % PAGE
        places = torch.from_numpy(layout.places[np.arange(m), where[1] // PAGE])
        self.pool.seen.view(-1).index_fill_(0, (places * PAGE + offsets)[:n], 0.0)
        rows = self.pool.rows(places, offsets)
        x = w.embed.index_select(0, tokens)
        turns = w.turns.index_select(0, at)
        for i, layer in enumerate(w.layers):
            q, keys, values = self._project(layer, x, turns)
            self.pool.write(i, rows, keys, values)
            x = self._finish(layer, x, decode_attention(self.pool, i, q, layout, apart=self.fixed))
        return w.head(self._normed(x, w.last)).float()

    def prefill(self, jobs: Sequence[PrefillTile]) -> None:
        """Compute keys and values of the given tiles; earlier tiles of a request come first in `jobs`."""
        w, real = self.weights, len(jobs) * TILE
        pad = self.tiles - len(jobs) if self.fixed else 0
        ids = np.concatenate([job.ids for job in jobs] + [np.zeros(pad * TILE, np.int64)])
        starts = np.repeat(np.array([job.index * TILE for job in jobs] + [0] * pad), TILE)
        positions = torch.from_numpy(starts + np.tile(np.arange(TILE), len(jobs) + pad))
        places = torch.tensor([job.pages[job.index // TILES].at for job in jobs]).repeat_interleave(TILE)
        rows = self.pool.rows(places, positions[:real] % PAGE)
        runs = [self._run(jobs[begin:end], begin) for begin, end in _runs(jobs, joined=not self.fixed)]
        x = w.embed.index_select(0, torch.from_numpy(ids))
        turns = w.turns.index_select(0, positions)
        mixed = x.new_zeros(len(ids), self._heads * self._hd)
        last = len(w.layers) - 1
        for i, layer in enumerate(w.layers):
            q, keys, values = self._project(layer, x, turns)
            self.pool.write(i, rows, keys[: real * self._kv], values[: real * self._kv])
            if i == last:
                return
            for cut, pages, mask in runs:
                mixed[cut] = prefill_attention(self.pool, i, q[cut], pages, mask)
            x = self._finish(layer, x, mixed)

    def _run(self, jobs: Sequence[PrefillTile], begin: int) -> tuple[slice, Tensor, Tensor]:
        """Return rows, places and mask of consecutive tiles of one request."""
        mask = causal_mask(jobs[0].index * TILE, len(jobs) * TILE)
        places = torch.tensor([page.at for page in jobs[0].pages[: len(mask)]])
        return slice(begin * TILE, (begin + len(jobs)) * TILE), places, mask


def _unit(x: Tensor, least: Tensor) -> Tensor:
    """Return x over hypot(|x|, least) along the last axis: RMSNorm without its weight factor."""
    return x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), least)


def _runs(jobs: Sequence[PrefillTile], joined: bool) -> Iterator[tuple[int, int]]:
    """Cut jobs into (begin, end) of consecutive tiles of one request, or singly."""
    begin = 0
    for end in range(1, len(jobs) + 1):
        before = jobs[end - 1]
        follows = end < len(jobs) and jobs[end].pages is before.pages and jobs[end].index == before.index + 1
        if not (joined and follows):
            yield begin, end
            begin = end
