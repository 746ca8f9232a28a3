"""Key/value caches per slot, and the attention of one new token in each slot.

Products need at least 4 rows. Where fewer query heads share a key head, the scores of neighbouring key heads
are one product: their keys are stacked, and a query is zero for the other heads, which changes no bit. The
product of weights and values instead reads surplus rows of the next head and drops their result. All buffers
and views are created once, since creating them would dominate a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.prefix_cache import TILE

BLOCK = 128
"""Keys per step of the weighted sum; cache lengths and trunks are multiples of it."""
_LEAST = 4
"""Rows below which a product uses another kernel."""
_VIEWS = 64
"""Compositions of a step whose views are cached."""


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class Caches:
    """keys [layers, rows, kv_heads, hd, cap], values [layers, rows, kv_heads, cap, hd].

    `seen` [rows, length] is 0 where a row may attend, else -inf.
    """

    def __init__(self, c: ModelConfig, rows: int, length: int) -> None:
        kv, hd = c.num_key_value_heads, c.head_dim
        self.rows, self.kv, self.hd, self.group = rows, kv, hd, c.num_attention_heads // kv
        self.length, self.cap = length, length + TILE
        self.keys = torch.zeros(c.num_hidden_layers, rows, kv, hd, self.cap)
        self.values = torch.zeros(c.num_hidden_layers, rows, kv, self.cap, hd)
        self.seen = torch.full((rows, length), -torch.inf)
        self.seen[:, 0] = 0.0
        self._flat_keys = [layer.view(-1) for layer in self.keys]
        self._flat_values = [layer.view(-1, hd) for layer in self.values]
        self._first_key = (torch.arange(rows * kv * hd) * self.cap).view(rows, -1)
        self._first_value = (torch.arange(rows * kv) * self.cap).view(rows, -1)

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def places(self, m: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return where `write` puts the tokens at positions [m] of the first m slots."""
        at = positions[:, None]
        return (self._first_key[:m] + at).view(-1), (self._first_value[:m] + at).view(-1)

    def write(self, layer: int, key_at: Tensor, value_at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys [m * kv_heads * hd] and values [m, kv_heads * hd] of one token per slot."""
        self._flat_keys[layer].index_copy_(0, key_at, keys)
        self._flat_values[layer].index_copy_(0, value_at, values.reshape(-1, self.hd))


class _View:
    """Inputs and outputs of a step with given sizes, for all layers."""

    def __init__(self, of: DecodeAttention, n: int, m: int, length: int, trunk: int, source: int) -> None:
        c = of.caches
        self.length, self.trunk, self.n = length, trunk, n
        heads, products = of.items * of.tall, n * of.items
        scores, shares = of.scores[: n * heads * length], of.shares[: n * heads * length]
        self.scores, self.shares = scores.view(n, heads, length), shares.view(n, heads, length)
        self.seen = c.seen[:n, None, :length]
        self.fresh = scores.view(products, of.tall, length)[:, :, trunk:]
        self.queries = of.queries[:n].view(products, of.tall, -1)
        self.keys = [k[:n].view(products, -1, c.cap)[:, :, trunk:length] for k in c.keys]
        wide = torch.as_strided(of.shares, (n * c.kv, of.least, length), (of.head_stride * length, length, 1))
        starts = range(trunk, length, BLOCK)
        self.blocks = [wide[:, :, at : at + BLOCK] for at in starts]
        values = [v[:n].view(n * c.kv, c.cap, c.hd) for v in c.values]
        self.values = [[v[:, at : at + BLOCK] for at in starts] for v in values]
        self.mixed = of.mixed[:n].view(n * c.kv, of.least, c.hd)
        self.own = of.mixed[:n, :, : c.group]
        self.flat, self.out = of.flat[:n].view(self.own.shape), of.flat[:m]
        self.turned, self.turned_keys = of.turned[:m], of.turned_keys[:m]
        self.new_keys = torch.view_as_real(self.turned_keys).view(-1)
        self.trunk_queries = torch.view_as_real(of.turned[:n]).permute(1, 2, 0, 3, 4, 5)
        pairs, strides = (n, c.kv, c.group, trunk), (heads * length, of.head_stride * length, length, 1)
        self.trunk_scores = torch.as_strided(of.scores, pairs, strides).transpose(0, 1)
        self.trunk_shares = torch.as_strided(of.shares, pairs, strides).transpose(0, 1)
        self.trunk_keys = [k[source, :, :, :trunk] for k in c.keys]
        self.trunk_values = [v[source, :, :trunk] for v in c.values]
        self.trunk_own = self.own.transpose(0, 1)


class DecodeAttention:
    """Call `begin` per step; per layer `turn` queries and keys, store the keys, then call."""

    def __init__(self, caches: Caches) -> None:
        c = self.caches = caches
        self._heads = c.kv * c.group
        fold = next((f for f in range(1, c.kv + 1) if c.kv % f == 0 and f * c.group >= _LEAST), 1)
        self.items = c.kv // fold
        self.tall = max(fold * c.group, _LEAST)
        """Rows of a product for scores; there are `items` of them per slot."""
        self.least = max(c.group, _LEAST)
        """Rows of a product of weights and values; there are kv_heads of them per slot."""
        self.head_stride = c.group if self.tall == fold * c.group else self.tall
        """Rows from the weights of one kv head to those of the next."""
        self.queries = torch.zeros(c.rows, self.items, self.tall, fold * c.hd)
        self.mixed = torch.zeros(c.rows, c.kv, self.least, c.hd)
        self.scores = torch.zeros(c.rows * self.items * self.tall * c.length)
        self.shares = torch.zeros(len(self.scores) + self.least * c.length)
        self.flat = torch.zeros(c.rows, self._heads * c.hd)
        # each head's own columns of `queries`: [rows, items, fold, group, hd / 2]
        parts = self.queries[:, :, : fold * c.group].view(-1, self.items, fold, c.group, fold, c.hd // 2, 2)
        own = parts.diagonal(dim1=2, dim2=4).permute(0, 1, 5, 2, 3, 4)
        self.turned = torch.view_as_complex(own)
        self.turned_keys = torch.zeros(c.rows, c.kv, c.hd // 2, dtype=torch.complex64)
        self._views: dict[tuple[int, int, int, int, int], _View] = {}
        self._view = _View(self, 1, _LEAST, BLOCK, 0, 0)

    def begin(self, n: int, m: int, length: int, trunk: int, source: int) -> None:
        """Set the sizes of a step: first n slots, m rows, `length` tokens; the rest as in DecodeSpan."""
        # the products that read the trunk take the queries of all slots together and want 4 rows as well
        key = (m, m, length, trunk, source) if trunk else (n, m, length, 0, 0)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            view = self._views[key] = _View(self, *key)
        self._view = view

    def turn(self, qk: Tensor, turns: Tensor) -> Tensor:
        """Rotate queries and keys [m, heads + kv_heads, hd / 2] by `turns`; return the keys."""
        view = self._view
        torch.mul(qk[:, : self._heads].view(view.turned.shape), turns[:, None, None], out=view.turned)
        torch.mul(qk[:, self._heads :], turns, out=view.turned_keys)
        return view.new_keys

    def __call__(self, layer: int) -> Tensor:
        """Return mixed values [m, heads * hd] of the rotated queries; garbage for slots from n on."""
        view = self._view
        if view.trunk:
            self._share_trunk(layer)
        if view.length > view.trunk:
            torch.bmm(view.queries, view.keys[layer], out=view.fresh)
        torch.softmax(view.scores.add_(view.seen), -1, out=view.shares)
        if view.trunk:
            self._mix_trunk(layer)
        for index, (shares, values) in enumerate(zip(view.blocks, view.values[layer], strict=True)):
            if index or view.trunk:
                view.mixed.baddbmm_(shares, values)
            else:
                torch.bmm(shares, values, out=view.mixed)
        view.flat.copy_(view.own)
        return view.out

    def _share_trunk(self, layer: int) -> None:
        """Compute scores of the trunk: the queries of all slots in one product per kv head."""
        view, c = self._view, self.caches
        rows = view.trunk_queries.reshape(c.kv, -1, c.hd)
        common = torch.bmm(rows, view.trunk_keys[layer])
        view.trunk_scores.copy_(common.view(view.trunk_scores.shape))

    def _mix_trunk(self, layer: int) -> None:
        view, c = self._view, self.caches
        rows = view.trunk_shares.reshape(c.kv, -1, view.trunk)
        common = torch.empty(c.kv, rows.shape[1], c.hd)
        add_blocks(rows, view.trunk_values[layer], view.trunk, common)
        view.trunk_own.copy_(common.view(view.trunk_own.shape))


def add_blocks(shares: Tensor, values: Tensor, length: int, out: Tensor) -> None:
    """Set out [b, m, hd] = shares [b, m, >= length] x values [b, >= length, hd], block by block of keys."""
    torch.bmm(shares[:, :, :BLOCK], values[:, :BLOCK], out=out)
    for at in range(BLOCK, length, BLOCK):
        out.baddbmm_(shares[:, :, at : at + BLOCK], values[:, at : at + BLOCK])
