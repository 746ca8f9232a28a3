"""Attention over a prefix tree with torch's flash kernels: every pair once, no copy of keys per row.

In preorder a first child follows its parent, so a run of first children is one causal sequence, a branch. The
later tokens of a node's subtree see the branch up to that node completely:

    tokens   |---- branch ----|-- second child of a node --|-- third --|
    causal   its own branch, once per branch
    whole    queries [second child, end of the node) x keys [branch, end of the node's tokens)

Each piece is one call of the flash kernel; partial results are merged by their log-sum-exp, and the backward
of a piece takes the merged ones, which makes it exact. A GPU kernel reads grouped keys and values directly;
for a CPU those of one piece at a time are repeated over the heads of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from insitu_train.attention.rows import flash_works, runs_on_gpu, widened
from insitu_train.plan.prefix_tree import Tree

aten = torch.ops.aten
LONG = 512
"""Mean queries of a piece from which a GPU runs flash kernels piece by piece, not flex_attention."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [q0, q1) that see keys [k0, k1): all of them, or only earlier ones when `causal`."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def tree_pieces(tree: Tree) -> tuple[Piece, ...]:
    """Cut a tree's visible pairs into pieces: each pair in exactly one, every token in one causal one."""
    parent, start, end = tree.parent.tolist(), tree.start.tolist(), tree.end.tolist()
    branch: list[int] = []
    """First token of the branch of each node."""
    second: dict[int, int] = {}
    """Node with several children -> first token of its second child."""
    heads: list[int] = []
    for n, above in enumerate(parent):
        if above >= 0 and above == n - 1:
            branch.append(branch[above])
            continue
        branch.append(start[n])
        heads.append(start[n])
        if above >= 0:
            second.setdefault(above, start[n])
    own = [Piece(a, b, a, b, True) for a, b in zip(heads, [*heads[1:], tree.tokens], strict=True)]
    return (*own, *(Piece(at, end[n], branch[n], start[n + 1], False) for n, at in sorted(second.items())))


def by_pieces(pieces: Sequence[Piece], device: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a tree's attention runs piece by piece on a kind of device, not by flex_attention."""
    long = sum(p.q1 - p.q0 for p in pieces) >= LONG * len(pieces)
    return device != "cuda" or (long and flash_works(dtype, head_dim))


@dataclass(frozen=True, slots=True)
class TreeAttend:
    """Attention between the tokens of one tree."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tree: Tree) -> TreeAttend:
        return cls(tree_pieces(tree))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if widened(q):
            return self(q.float(), k.float(), v.float(), scale).to(q.dtype)
        out: Tensor = _Pieces.apply(q, k, v, scale, self.pieces)  # type: ignore[no-untyped-call]
        return out


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        pieces: tuple[Piece, ...],
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = out.new_empty(q.shape[:2])
        for p in pieces:
            part, sums = _attend(p, q, k, v, scale)
            mine = (slice(None), slice(p.q0, p.q1))
            if p.causal:
                out[mine], lse[mine] = part, sums
                continue
            both = torch.logaddexp(lse[mine], sums)
            out[mine] *= (lse[mine] - both).exp().unsqueeze(-1)
            out[mine].addcmul_(part, (sums - both).exp().unsqueeze(-1))
            lse[mine] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (scale, pieces)  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        scale, pieces = ctx.settings
        sums = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v)]
        for p in pieces:
            result = _backward(p, (grad, q, k, v, out, lse), scale)
            for total, part, ends in zip(sums, result, ((p.q0, p.q1), *[(p.k0, p.k1)] * 2), strict=True):
                total[:, slice(*ends)] += part
        return *(s.to(t.dtype) for s, t in zip(sums, (q, k, v), strict=True)), None, None


def _seen(p: Piece, x: Tensor, heads: int) -> Tensor:
    """Return a piece's keys or values of x [kv_heads, U, hd] in the kernel's layout.

    GPU: a view [1, kv_heads, K, hd]; CPU: [1, heads, K, hd].
    """
    own = x[:, p.k0 : p.k1]
    grouped = runs_on_gpu(x) or x.shape[0] == heads
    return own[None] if grouped else own.repeat_interleave(heads // x.shape[0], 0)[None]


def _gather(x: Tensor, heads: int) -> Tensor:
    """Map the gradient of `_seen` to [kv_heads, K, hd], summed over the heads of a group."""
    return x if x.shape[0] == heads else x.view(heads, -1, *x.shape[1:]).sum(1)


def _attend(p: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [heads, Q, hd] and log-sum-exp [heads, Q] of one piece."""
    inputs = (q[None, :, p.q0 : p.q1], _seen(p, k, q.shape[0]), _seen(p, v, q.shape[0]))
    if runs_on_gpu(q):
        result = aten._scaled_dot_product_flash_attention.default(*inputs, 0.0, p.causal, False, scale=scale)
    else:
        result = aten._scaled_dot_product_flash_attention_for_cpu.default(*inputs, 0.0, p.causal, scale=scale)
    return result[0][0], result[1][0, :, : p.q1 - p.q0].float()


def _backward(p: Piece, inputs: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a piece's queries, keys and values from merged outputs and log-sum-exps."""
    grad, q, k, v, out, lse = inputs
    mine = (None, slice(None), slice(p.q0, p.q1))
    keys, values = _seen(p, k, q.shape[0]), _seen(p, v, q.shape[0])
    args = (grad[mine], q[mine], keys, values, out[mine], lse[mine].contiguous())
    if runs_on_gpu(q):
        # Sequence offsets, even empty ones, would select the variable-length kernel. The random state is not
        # read without dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        result = aten._scaled_dot_product_flash_attention_backward.default(
            *args, None, None, p.q1 - p.q0, p.k1 - p.k0, 0.0, p.causal, state, state[:0], scale=scale
        )
    else:
        result = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *args, 0.0, p.causal, scale=scale
        )
    return result[0][0], _gather(result[1][0], k.shape[0]), _gather(result[2][0], k.shape[0])


def visible(tree: Tree) -> Tensor:
    """Return the mask [U, U] bool, query by key, by definition (for tests and small trees)."""
    last = torch.from_numpy(np.asarray(tree.end)[tree.node].astype(np.int64))
    at = torch.arange(tree.tokens)
    return (at[:, None] >= at[None]) & (at[:, None] < last[None])
