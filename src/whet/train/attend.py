"""Causal attention over flat token lists: one row, or rows behind a prefix that they share.

A flat list is the prefix followed by the rows, each padded to the same width. No mask is ever held where the
device has a kernel for the pattern, and keys and values of the prefix are computed once. Each class is an
`Attend` of policy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True, slots=True)
class Causal:
    """Every token sees itself and all before it."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )[0]


@dataclass(frozen=True, slots=True)
class Shared:
    """`prefix` tokens, then `rows` rows of equal width; a row sees the prefix and itself."""

    prefix: int
    rows: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        gqa, n = q.shape[0] != k.shape[0], self.prefix
        own = (self._rows(q), self._behind(k), self._behind(v))
        width, length = own[0].shape[2], own[1].shape[2]
        seen = (
            causal_lower_right(width, length)
            if q.is_cuda
            else torch.ones(width, length, dtype=torch.bool).tril(length - width)
        )
        mixed = F.scaled_dot_product_attention(*own, attn_mask=seen, scale=scale, enable_gqa=gqa)
        flat = mixed.transpose(0, 1).flatten(1, 2)
        if not n:
            return flat
        return torch.cat([Causal()(q[:, :n], k[:, :n], v[:, :n], scale), flat], 1)

    def _rows(self, x: Tensor) -> Tensor:
        """[heads, U, hd] -> the rows' part as [rows, heads, width, hd]."""
        own = x[:, self.prefix :]
        return own.reshape(x.shape[0], self.rows, -1, x.shape[-1]).transpose(0, 1)

    def _behind(self, x: Tensor) -> Tensor:
        """[heads, U, hd] -> [rows, heads, prefix + width, hd]."""
        own = self._rows(x)
        if not self.prefix:
            return own
        return torch.cat([x[None, :, : self.prefix].expand(self.rows, -1, -1, -1), own], 2)


def lay_flat(prefix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Causal | Shared]:
    """prefix [P], rows [B, T] -> ids [U], positions [U] and the attention between them; U = P + B T."""
    n, (count, width) = prefix.shape[0], rows.shape
    ids = torch.cat([prefix, rows.flatten()])
    positions = torch.arange(n + width, device=ids.device)
    if count == 1:
        return ids, positions, Causal()
    positions = torch.cat([positions[:n], positions[n:].repeat(count)])
    return ids, positions, Shared(n, count)
