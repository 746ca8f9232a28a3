"""Two forward passes over per-slot key/value caches that give each token the same bits in any company.

DECODE computes one token for each of the first n slots (n a multiple of 8; idle ones compute rubbish into a
scratch column). PREFILL computes keys and values of 16-token tiles; the last prompt token goes through
DECODE, so there is a single path to logits. What makes the bits equal: every product has at least 4 rows
(below that other kernels are used), weighted values are added up in blocks of 128 keys in order of position,
and masked keys weigh exactly 0. `embedded_check` proves it on this machine for what may vary: rows, cache
lengths, cuts of a prompt, and the trunk (a prefix common to all decoding slots, read once). Where it does
not hold, `fixed` pins the shapes. A single thread owns an instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from whet.engine.embedded_cache import TILE
from whet.engine.embedded_weights import LayerWeights, Weights

BLOCK = 128
"""Keys per step of the weighted sum; cache lengths and trunks are multiples of it."""
ROWS = 8
"""Decode rows come in multiples of this."""
_LEAST = 4
"""Rows below which a product takes another kernel."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One prefill job: `ids` [TILE] (padded) for positions index * TILE .. of a slot."""

    slot: int
    index: int
    ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """What a decode step reads: of the first `slots` slots, `length` tokens, the first `trunk` of which
    are the same in all slots that matter and are read from slot `source` only."""

    slots: int
    length: int
    trunk: int = 0
    source: int = 0


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class Forward:
    """Caches and forward passes for `rows` slots of up to `max_context` tokens."""

    def __init__(self, weights: Weights, rows: int, max_context: int, tiles: int) -> None:
        c = weights.config
        self.weights = weights
        self.rows, self.tiles = rows, tiles
        self.length = round_up(max_context, BLOCK)
        self.fixed = False
        """Pin every shape, for machines where `embedded_check` finds that they matter."""
        self.unified = False
        """DECODE gives the bits of PREFILL; proven by `embedded_check`, else not relied upon."""
        self._heads, self._kv, self._hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self._group = self._heads // self._kv
        self._padded = max(self._group, _LEAST)
        cap = self.length + TILE
        self.keys = torch.zeros(c.num_hidden_layers, rows, self._kv, self._hd, cap)
        self.values = torch.zeros(c.num_hidden_layers, rows, self._kv, cap, self._hd)
        self.scratch = self.length
        """A column no attention reads: where idle rows write."""
        self.seen = torch.full((rows, self.length), -torch.inf)
        self.seen[:, 0] = 0.0
        self._slots = torch.arange(rows)
        self._queries = torch.zeros(rows, self._kv, self._padded, self._hd)
        self._mixed = torch.zeros(rows, self._kv, self._padded, self._hd)
        self._scores = torch.zeros(rows * self._kv * self._padded * self.length)
        self._shares = torch.zeros((rows * self._kv * self._group + self._padded) * self.length)
        width = tiles * TILE
        causal = torch.full((width, width + BLOCK), -torch.inf).triu(1)
        self._window = torch.cat([torch.zeros(width, self.length), causal], 1)
        """A run of tiles from position p on sees columns length - p .. of this."""

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

    # ------------------------------------------------------------------ decode

    def decode(self, ids: Tensor, positions: Tensor, span: Span) -> Tensor:
        """One token per row: ids, positions [rows] -> logits [n, vocab]; row i is slot i, n >= span.slots.

        Idle rows have position `scratch`.
        """
        w, c = self.weights, self.weights.config
        n = self.rows if self.fixed else min(self.rows, round_up(span.slots, ROWS))
        length = self.length if self.fixed else round_up(span.length, BLOCK)
        trunk = 0 if self.fixed else span.trunk
        ids, positions, slots = ids[:n], positions[:n], self._slots[:n]
        x = F.embedding(ids, w.embed)
        turns = w.turns[positions.clamp_max(w.turns.shape[0] - 1)]
        for i, layer in enumerate(w.layers):
            qk, v = self._project(layer, x, turns)
            self.keys[i][slots, :, :, positions] = qk[:, self._heads :]
            self.values[i][slots, :, positions] = v
            q = qk[:, : self._heads].view(n, self._kv, self._group, self._hd)
            shares = self._share(i, q, length, trunk, span.source)
            x = self._finish(layer, x, self._mix(i, shares, trunk, span.source))
        return F.linear(F.rms_norm(x, (c.hidden_size,), w.norm, c.rms_norm_eps), w.head)

    def _share(self, layer: int, q: Tensor, length: int, trunk: int, source: int) -> Tensor:
        """Attention weights [n, kv_heads, group, length] of q [n, kv_heads, group, hd]."""
        n, padded = q.shape[0], self._padded
        pairs = n * self._kv
        scores = self._scores[: pairs * padded * length].view(n, self._kv, padded, length)
        if length > trunk:
            self._queries[:n, :, : self._group] = q
            k = self.keys[layer, :n].flatten(0, 1)[:, :, trunk:length]
            queries = self._queries[:n].view(pairs, padded, self._hd)
            torch.bmm(queries, k, out=scores.view(pairs, padded, length)[:, :, trunk:])
        if trunk:
            rows = q.transpose(0, 1).reshape(self._kv, n * self._group, self._hd)
            common = torch.bmm(rows, self.keys[layer, source, :, :, :trunk])
            common = common.view(self._kv, n, self._group, trunk).transpose(0, 1)
            scores[:, :, : self._group, :trunk] = common
        masked = scores[:, :, : self._group] + self.seen[:n, None, None, :length]
        out = self._shares[: masked.numel()].view(masked.shape)
        return torch.softmax(masked, -1, out=out)

    def _mix(self, layer: int, shares: Tensor, trunk: int, source: int) -> Tensor:
        """Weighted values [n, heads * hd], block after block of keys."""
        n, kv, group, length = shares.shape
        mixed, v = self._mixed[:n], self.values[layer, :n].flatten(0, 1)
        flat = mixed.view(n * kv, self._padded, self._hd)
        if trunk:
            rows = shares[..., :trunk].transpose(0, 1).reshape(kv, n * group, trunk)
            common = rows.new_empty(kv, n * group, self._hd)
            _add_blocks(rows, self.values[layer, source], 0, trunk, common)
            mixed[:, :, :group] = common.view(kv, n, group, self._hd).transpose(0, 1)
        # Products need 4 rows; where a group has fewer, the surplus rows read into the next pair's weights,
        # which is cheaper than copying, and what they give is dropped.
        wide = torch.as_strided(self._shares, (n * kv, self._padded, length), (group * length, length, 1))
        _add_blocks(wide, v, trunk, length, flat)
        return mixed[:, :, :group].reshape(n, -1)

    # ------------------------------------------------------------------ prefill

    def prefill(self, jobs: Sequence[Tile]) -> None:
        """Compute keys and values of the given tiles; earlier tiles of a slot come first in `jobs`."""
        w = self.weights
        pad = self.tiles - len(jobs) if self.fixed else 0
        ids = np.concatenate([job.ids for job in jobs] + [np.zeros(pad * TILE, np.int64)])
        starts = np.repeat(np.array([job.index * TILE for job in jobs] + [0] * pad), TILE)
        positions = torch.from_numpy(starts + np.tile(np.arange(TILE), len(jobs) + pad))
        slots = torch.from_numpy(np.repeat(np.array([job.slot for job in jobs]), TILE))
        real = len(jobs) * TILE
        runs = list(_runs(jobs, joined=not self.fixed))
        x = F.embedding(torch.from_numpy(ids), w.embed)
        turns = w.turns[positions]
        mixed = torch.zeros(len(ids), self._heads * self._hd)
        last = len(w.layers) - 1
        for i, layer in enumerate(w.layers):
            qk, v = self._project(layer, x, turns)
            self.keys[i][slots, :, :, positions[:real]] = qk[:real, self._heads :]
            self.values[i][slots, :, positions[:real]] = v[:real]
            if i == last:
                return
            for begin, end in runs:
                rows = slice(begin * TILE, end * TILE)
                mixed[rows] = self._attend_run(i, jobs[begin], qk[rows, : self._heads])
            x = self._finish(layer, x, mixed)

    def _attend_run(self, layer: int, first: Tile, q: Tensor) -> Tensor:
        """Attention of consecutive tiles of one slot: q [m, heads, hd] -> [m, heads * hd]."""
        m, start = q.shape[0], first.index * TILE
        length = round_up(start + m, BLOCK)
        q = q.view(m, self._kv, self._group, self._hd).permute(1, 2, 0, 3)
        rows = q.reshape(self._kv, self._group * m, self._hd)
        scores = torch.bmm(rows, self.keys[layer, first.slot, :, :, :length])
        mask = self._window[:m, self.length - start :][:, :length]
        scores.view(self._kv, self._group, m, length).add_(mask)
        out = _add_blocks(
            torch.softmax(scores, -1), self.values[layer, first.slot], 0, length, torch.empty_like(rows)
        )
        return out.view(self._heads, m, self._hd).transpose(0, 1).reshape(m, -1)


def _add_blocks(shares: Tensor, values: Tensor, begin: int, end: int, out: Tensor) -> Tensor:
    """out [b, m, hd]: what it holds (nothing where begin is 0) plus shares times values, keys begin..end."""
    for at in range(begin, end, BLOCK):
        a, v = shares[:, :, at : at + BLOCK], values[:, at : at + BLOCK]
        if at:
            out.baddbmm_(a, v)
        else:
            torch.bmm(a, v, out=out)
    return out


def _runs(jobs: Sequence[Tile], joined: bool) -> Iterator[tuple[int, int]]:
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
