"""Two forward paths over per-slot key/value caches, with shapes that make results independent of company.

DECODE runs all `rows` slots always (idle ones compute rubbish into a scratch column). PREFILL runs tiles of
16 tokens at absolute positions 16k..16k+15; each tile attends with its own call, whose shape depends on k
only. What still varies (cache length read, slots read, tiles per call) was found not to change a bit on
this machine by `embedded_check`; where it does, `fixed` pins these too. Prefill gives keys and values only:
the last prompt token goes through DECODE, so there is a single path to logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from whet.engine.embedded_cache import TILE
from whet.engine.embedded_weights import LayerWeights, Weights

BLOCK = 64
"""Cache lengths are read in multiples of this."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One prefill job: `ids` [TILE] (padded) for positions index * TILE .. of a slot."""

    slot: int
    index: int
    ids: npt.NDArray[np.int64]


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class Forward:
    """Caches and forward passes for `rows` slots of up to `length` tokens."""

    def __init__(self, weights: Weights, rows: int, max_context: int, tiles: int) -> None:
        c = weights.config
        self.weights = weights
        self.rows, self.tiles = rows, tiles
        self.length = round_up(max_context, BLOCK)
        self.fixed = False
        """Pin every shape, for machines where `embedded_check` finds that they matter."""
        self._heads, self._kv, self._hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self._group = self._heads // self._kv
        cap = self.length + TILE
        self.keys = torch.zeros(c.num_hidden_layers, rows, self._kv, self._hd, cap)
        self.values = torch.zeros(c.num_hidden_layers, rows, self._kv, cap, self._hd)
        self.scratch = self.length
        """A column no attention reads: where idle rows write."""
        self.seen = torch.full((rows, self.length), -torch.inf)
        self.seen[:, 0] = 0.0
        self._slots = torch.arange(rows)
        self._mixed = torch.zeros(rows, self._heads * self._hd)
        causal = torch.full((TILE, TILE), -torch.inf).triu(1)
        self._window = torch.cat([torch.zeros(TILE, self.length), causal], 1).repeat(self._group, 1)
        """[group * TILE, length + TILE]: the last 16(k+1) columns are the mask of tile k."""

    def show(self, slot: int, n: int) -> None:
        """Let decode rows of `slot` attend to its first n cached tokens."""
        with torch.inference_mode():
            self.seen[slot, :n] = 0.0

    def hide(self, slot: int) -> None:
        """Back to idle: nothing but column 0, which is always finite."""
        with torch.inference_mode():
            self.seen[slot] = -torch.inf
            self.seen[slot, 0] = 0.0

    def reset(self, weights: Weights) -> None:
        """Take new weights; what the slots hold is void."""
        self.weights = weights
        self.keys.zero_()
        self.values.zero_()

    def _project(self, w: LayerWeights, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, d] -> rotated queries and keys [M, heads + kv_heads, hd], values [M, kv_heads, hd]."""
        c, m, both = self.weights.config, x.shape[0], self._heads + self._kv
        qkv = F.linear(F.rms_norm(x, (c.hidden_size,), w.in_norm, c.rms_norm_eps), w.qkv)
        qk, v = qkv[:, : both * self._hd], qkv[:, both * self._hd :]
        qk = F.rms_norm(qk.view(m, both, self._hd), (self._hd,), None, c.rms_norm_eps) * w.qk_norm
        turned = torch.view_as_complex(qk.view(m, both, self._hd // 2, 2)) * turns
        return torch.view_as_real(turned).view(m, both, self._hd), v.view(m, self._kv, self._hd)

    def _finish(self, w: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of a layer after attention: [M, d] -> [M, d]."""
        c = self.weights.config
        x = x + F.linear(mixed, w.out)
        h = F.linear(F.rms_norm(x, (c.hidden_size,), w.mlp_norm, c.rms_norm_eps), w.gate_up)
        gate, up = h[:, : c.intermediate_size], h[:, c.intermediate_size :]
        return x + F.linear(F.silu(gate) * up, w.down)

    def decode(self, ids: Tensor, positions: Tensor, slots: int, length: int) -> Tensor:
        """One token per row: ids, positions [rows] -> logits [rows, vocab]. Row i is slot i.

        `slots` and `length` bound what attention must read. Idle rows have position `scratch`.
        """
        w, c = self.weights, self.weights.config
        n = self.rows if self.fixed else slots
        span = self.length if self.fixed else round_up(length, BLOCK)
        x = F.embedding(ids, w.embed)
        turns = w.turns[positions.clamp_max(w.turns.shape[0] - 1)]
        for i, layer in enumerate(w.layers):
            qk, v = self._project(layer, x, turns)
            self.keys[i][self._slots, :, :, positions] = qk[:, self._heads :]
            self.values[i][self._slots, :, positions] = v
            self._attend(i, qk[:n, : self._heads], n, span)
            x = self._finish(layer, x, self._mixed)
        return F.linear(F.rms_norm(x, (c.hidden_size,), w.norm, c.rms_norm_eps), w.head)

    def _attend(self, layer: int, q: Tensor, n: int, span: int) -> None:
        """Attention of slots 0..n-1 over their first `span` tokens, into `_mixed`."""
        k = self.keys[layer, :n].flatten(0, 1)[:, :, :span]
        v = self.values[layer, :n].flatten(0, 1)[:, :span]
        scores = torch.bmm(q.reshape(n * self._kv, self._group, self._hd), k)
        scores.view(n, self._heads, span).add_(self.seen[:n, None, :span])
        torch.bmm(torch.softmax(scores, -1), v, out=self._mixed[:n].view(n * self._kv, self._group, self._hd))

    def prefill(self, jobs: Sequence[Tile]) -> None:
        """Compute keys and values of the given tiles; earlier tiles of a slot come first in `jobs`."""
        w = self.weights
        pad = self.tiles - len(jobs) if self.fixed else 0
        ids = np.concatenate([job.ids for job in jobs] + [np.zeros(pad * TILE, np.int64)])
        starts = np.repeat(np.array([job.index * TILE for job in jobs] + [0] * pad), TILE)
        positions = torch.from_numpy(starts + np.tile(np.arange(TILE), len(jobs) + pad))
        slots = torch.from_numpy(np.repeat(np.array([job.slot for job in jobs]), TILE))
        real = len(jobs) * TILE
        x = F.embedding(torch.from_numpy(ids), w.embed)
        turns = w.turns[positions.clamp_max(w.turns.shape[0] - 1)]
        mixed = torch.zeros(len(jobs) + pad, self._kv, self._group, TILE, self._hd)
        last = len(w.layers) - 1
        for i, layer in enumerate(w.layers):
            qk, v = self._project(layer, x, turns)
            self.keys[i][slots, :, :, positions[:real]] = qk[:real, self._heads :]
            self.values[i][slots, :, positions[:real]] = v[:real]
            if i == last:
                return
            q = qk[:, : self._heads].view(-1, TILE, self._kv, self._group, self._hd).permute(0, 2, 3, 1, 4)
            self._attend_tiles(i, jobs, q.flatten(2, 3), mixed.flatten(2, 3))
            x = self._finish(layer, x, mixed.permute(0, 3, 1, 2, 4).reshape(x.shape[0], -1))

    def _attend_tiles(self, layer: int, jobs: Sequence[Tile], q: Tensor, mixed: Tensor) -> None:
        """Each tile on its own: q, mixed [T, kv_heads, group * TILE, hd]; its span depends on index only."""
        for t, job in enumerate(jobs):
            span = (job.index + 1) * TILE
            mask = self._window[:, self._window.shape[1] - span :]
            scores = torch.baddbmm(mask, q[t], self.keys[layer, job.slot, :, :, :span])
            torch.bmm(torch.softmax(scores, -1), self.values[layer, job.slot, :, :span], out=mixed[t])
