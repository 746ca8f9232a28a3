"""Attention over pages: each page by itself, then one weighted sum over the pages of a row.

A row is one new token of a request. The result of a page depends on that page and the row's queries alone,
and a row adds its pages up in order, so nothing else can show in its bits. A page that several rows share is
read once, by one product for all of their queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from insitu_train.embedded.pages import HIDDEN, PAGE, Page, PagePool
from insitu_train.embedded.weights import BFLOAT16

LEAST = 4
"""Query heads per key head below which a float32 product uses another kernel: surplus ones are zeros."""
FEW, MANY = 32, 24
"""Rows up to which and pages from which two products of bfloat16 are faster than torch's kernel."""


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend to pages: q [E, kv, rows, hd], k and v [E, kv, PAGE, hd], mask [E, 1, rows or 1, PAGE].

    Returns results [E, rows, kv, hd] and, to add up pages, log-sums of exponentials [E, rows, kv].
    """
    if BFLOAT16 and q.dtype == torch.bfloat16 and q.shape[2] <= FEW and len(q) >= MANY:
        return _attend_by_products(q, k, v, mask)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=q.shape[-1] ** -0.5
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what `attend` does for bfloat16.

    A product rounds its sums to 8 bits; a second one returns what the first has rounded off.
    """
    pages, kv, rows, hd = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    rounded = torch.bmm(q, k)
    rest = torch.baddbmm(rounded.neg(), q, k)
    scores = rounded.float().add_(rest).mul_(hd**-0.5).view(pages, kv, rows, -1)
    if mask is not None:
        scores.add_(mask)
    weights = torch.softmax(scores, -1)
    out = torch.bmm(weights.to(q.dtype).flatten(0, 1), v).view(pages, kv, rows, hd)
    lse = scores.amax(-1) - weights.amax(-1).log_()
    return out.transpose(1, 2), lse.transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which pages the rows of decode steps attend to; holds until a page is taken, moved or released."""

    rows: int
    """With idle ones at the end."""
    low: slice
    """Places of the pages with one user."""
    owners: Tensor
    """[low] the row of each of these; of no meaning for unused pages among them."""
    high: slice
    """Places of pages with several users; empty = none."""
    sharers: Tensor
    """[high * most] rows of each of these, repeated up to the largest number."""
    most: int
    order: Tensor
    """[rows * pages] for each row the results of its pages in order: one per owner, then one per sharer."""
    absent: Tensor | None
    """[rows, pages, 1, 1] HIDDEN where a row has fewer pages; None = each row has one."""
    places: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """[rows, pages] places; scratch memory for idle rows."""

    @classmethod
    def of(cls, tables: Sequence[Sequence[Page]], rows: int, pool: PagePool) -> Layout:
        """Return the layout of `rows` rows, of which the first attend to the pages of `tables`."""
        widest = max(map(len, tables))
        cells = [(page, i, j) for i, table in enumerate(tables) for j, page in enumerate(table)]
        single = [(page.at, i, j) for page, i, j in cells if not page.shared]
        shared = [(page.at, i, j) for page, i, j in cells if page.shared]
        order = np.zeros((rows, widest), np.int64)
        absent = np.full((rows, widest), HIDDEN, np.float32)
        places = np.full((rows, widest), pool.scratch, np.int64)
        for i, table in enumerate(tables):
            absent[i, : len(table)] = 0.0
            places[i, : len(table)] = [page.at for page in table]
        begin, end = min(single)[0], max(single)[0] + 1
        owners = np.zeros(end - begin, np.int64)
        for at, i, j in single:
            owners[at - begin], order[i, j] = i, at - begin
        users: dict[int, list[int]] = {}
        for at, i, _ in shared:
            users.setdefault(at, []).append(i)
        most = max(map(len, users.values()), default=0)
        first, last = (min(users), max(users) + 1) if users else (0, 0)
        sharers = np.zeros((last - first, most), np.int64)
        for at, rows_of in users.items():
            sharers[at - first, : len(rows_of)] = rows_of
        for at, i, j in shared:
            order[i, j] = end - begin + (at - first) * most + users[at].index(i)
        return cls(
            rows,
            slice(begin, end),
            torch.from_numpy(owners),
            slice(first, last),
            torch.from_numpy(sharers.reshape(-1)),
            most,
            torch.from_numpy(order.reshape(-1)),
            torch.from_numpy(absent)[..., None, None] if widest > 1 else None,
            places,
        )


def decode_attention(pool: PagePool, layer: int, q: Tensor, layout: Layout, *, apart: bool) -> Tensor:
    """Attend one token per row: q [rows, kv, group, hd] -> [rows, heads * hd].

    apart: read a shared page once per row, by the products of a page that is not shared.
    """
    m, kv, group, hd = q.shape
    if group < LEAST and q.dtype == torch.float32:
        q = torch.cat([q, q.new_zeros(m, kv, LEAST - group, hd)], 2)
    keys, values = pool.keys[layer], pool.values[layer]
    seen = pool.seen[layout.low][:, None, None]
    found = [attend(q.index_select(0, layout.owners), keys[layout.low], values[layout.low], seen)]
    if layout.most:
        found.append(_attend_shared(keys[layout.high], values[layout.high], q, layout, apart))
    out, lse = found[0] if len(found) == 1 else (torch.cat(parts) for parts in zip(*found, strict=True))
    out = out.index_select(0, layout.order).view(m, -1, *out.shape[1:])
    if layout.absent is None:
        mixed = out[:, 0]
    else:
        lse = lse.index_select(0, layout.order).view(m, -1, *lse.shape[1:])
        mixed = _added(out, lse + layout.absent, 1)
    return mixed[:, :group].transpose(1, 2).reshape(m, -1).to(q.dtype)


def _attend_shared(
    keys: Tensor, values: Tensor, q: Tensor, layout: Layout, apart: bool
) -> tuple[Tensor, Tensor]:
    """Return results [pages * most, rows, kv, hd] and log-sums of shared pages; all their tokens are seen."""
    _, kv, tall, hd = q.shape
    pages, most = len(keys), layout.most
    q = q.index_select(0, layout.sharers).view(pages, most, kv, tall, hd)
    if apart:
        found = [attend(q[:, at], keys, values, None) for at in range(most)]
        out, lse = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    else:
        out, lse = attend(q.transpose(1, 2).reshape(pages, kv, most * tall, hd), keys, values, None)
    return out.reshape(-1, tall, kv, hd), lse.reshape(-1, tall, kv)


def prefill_attention(pool: PagePool, layer: int, q: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Attend consecutive tokens of a request: q [m, kv, group, hd] -> [m, heads * hd].

    places [pages] of the request up to these tokens; mask [pages, m, PAGE].
    """
    m, kv, group, hd = q.shape
    pages = len(places)
    q = q.permute(1, 2, 0, 3).reshape(1, kv, group * m, hd).expand(pages, -1, -1, -1)
    keys, values = (held[layer].index_select(0, places) for held in (pool.keys, pool.values))
    out, lse = attend(q, keys, values, mask.repeat(1, group, 1)[:, None].to(q.dtype))
    if pages > 1:
        out = _added(out, lse.contiguous(), 0)
    return out.view(group, m, kv, hd).permute(1, 2, 0, 3).reshape(m, -1).to(q.dtype)


def _added(out: Tensor, lse: Tensor, dim: int) -> Tensor:
    """Return the results of all pages, numbered by `dim`, as one; softmax would round by its shape."""
    weights = (lse - lse.amax(dim, keepdim=True)).exp_()
    return (out * weights[..., None]).sum(dim) / weights.sum(dim)[..., None]


def causal_mask(start: int, m: int) -> Tensor:
    """Return the mask [pages, m, PAGE] of m tokens from position `start` on."""
    pages = round_up(start + m, PAGE) // PAGE
    hidden = torch.arange(pages * PAGE)[None] > torch.arange(start, start + m)[:, None]
    return (hidden * HIDDEN).view(m, pages, PAGE).transpose(0, 1)
