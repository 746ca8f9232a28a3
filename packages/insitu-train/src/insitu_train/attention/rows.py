"""Causal attention over flat token lists: one row, or rows after a prefix that they share.

A flat list is the prefix followed by the rows, each padded to the same width. No mask is built where the
device has a kernel for the pattern. Keys and values of the prefix are computed once and copied once per row.
Each class is an `Attend` of model/base.py. On meta tensors (memory/meta_run.py) the kernels of the emulated
device are replaced by ops with the same outputs, saved tensors and workspace.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EMULATED: ContextVar[str] = ContextVar("device that meta tensors stand for", default="cuda")
_LOWER_RIGHT = 2
"""The kernel's code for: causal, the last query aligned with the last key."""


def runs_on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or a meta tensor that stands for one."""
    return x.is_cuda or (x.is_meta and EMULATED.get() == "cuda")


def widened(x: Tensor) -> bool:
    """Return whether attention of x is computed in float32: a CPU's bfloat16 kernel is several times slower.

    It also rounds the attention weights.
    """
    return x.dtype == torch.bfloat16 and not runs_on_gpu(x)


def flash_works(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the GPU runs torch's flash kernel: 16 bits, head_dim <= 256, Ampere or later."""
    return dtype != torch.float32 and head_dim % 8 == 0 and head_dim <= 256 and _ampere()


def _ampere() -> bool:
    # a prediction made without a GPU is for a current one
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """Attend q [B, heads, Q, hd] to k, v [B, kv_heads, K, hd]; returns [B, heads, Q, hd].

    seen: [Q, K] bool mask; None = causal, the last query aligned with the last key.
    """
    if runs_on_gpu(q) and not flash_works(q.dtype, q.shape[3]):
        # Of the other kernels only the one that holds all scores takes grouped keys.
        k, v = _per_head(k, q.shape[1]), _per_head(v, q.shape[1])
    return (emulated if q.is_meta else _stock)(q, k, v, scale, seen)


def _stock(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Run one of torch's kernels."""
    gpu = runs_on_gpu(q)
    if seen is None and gpu and flash_works(q.dtype, q.shape[3]):
        # By name: from 2.11 on torch would choose cuDNN where Q == K, whose bits depend on the layout, which
        # plans for each length and takes memory that the prediction does not count. Where Q != K, torch's
        # CausalBias would run this kernel, but allocates Q x K numbers on the host.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
        out: Tensor = kernel(q, k, v, 0.0, True, False, scale=scale)[0]
        return out
    if seen is None and q.shape[2] != k.shape[2]:
        if gpu and (q.dtype == torch.float32 or (q.shape[3] % 8 == 0 and _ampere())):
            return _efficient(q, k, v, scale)
        seen = _lower_right(q, k)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Map [B, kv_heads, K, hd] to [B, heads, K, hd]; a copy where heads are grouped."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Call the memory-efficient kernel, causal, the last query aligned with the last key."""
    result = torch.ops.aten._efficient_attention_forward.default(
        *(x.transpose(1, 2) for x in (q, k, v)),
        bias=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dropout_p=0.0,
        custom_mask_type=_LOWER_RIGHT,
        compute_log_sumexp=any(x.requires_grad for x in (q, k, v)),
        scale=scale,
        seqlen_k=None,
    )
    out: Tensor = result[0].transpose(1, 2)
    return out


def _lower_right(q: Tensor, k: Tensor) -> Tensor:
    """Return the causal mask [Q, K] with the last query aligned with the last key."""
    queries, keys = q.shape[2], k.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


def emulated(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Allocate, on the meta device, what the device's kernel would return and keep."""
    if runs_on_gpu(q) and (seen is not None or v.shape[-1] != q.shape[-1]):
        k, v = _per_head(k, q.shape[1]), _per_head(v, q.shape[1])
        bias = None if seen is None else seen.to(q.dtype).expand(*q.shape[:3], k.shape[2])
        memory_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        wide: Tensor = memory_efficient(q, k, v, bias, True, 0.0, seen is None, scale=scale)[0]
        return wide
    if v.shape[-1] != q.shape[-1]:
        # no kernel of a CPU takes it: all scores are held
        scores = torch.ops.aten._scaled_dot_product_attention_math.default
        held_scores: Tensor = scores(q, k, v, seen, 0.0, seen is None, None, scale=scale, enable_gqa=True)[0]
        return held_scores
    q, k, v = _Release.apply(q, k, v)  # type: ignore[no-untyped-call]
    if not runs_on_gpu(q):
        mask = None if seen is None else torch.where(seen, 0.0, -torch.inf).to(q.dtype)
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out = on_cpu(q, k, v, 0.0, seen is None, attn_mask=mask, scale=scale)[0]
        torch.empty(_blocks(q.shape[2], k.shape[2]), device="meta")
        # and a contiguous copy of the gradient
        workspace = [(2 * _blocks(q.shape[2], k.shape[2]), torch.float32), (out.numel(), out.dtype)]
    else:
        on_gpu = torch.ops.aten._scaled_dot_product_flash_attention.default
        out = on_gpu(q, k, v, 0.0, True, False, scale=scale)[0]
        # fp32 sums of dq and of the softmax; dk and dv of every head before they are summed per group
        workspace = [(out.numel() + out.numel() // out.shape[-1], torch.float32)]
        if q.shape[1] != k.shape[1]:
            workspace.append((2 * out.numel(), out.dtype))
    held: Tensor = _Workspace.apply(out, workspace)  # type: ignore[no-untyped-call]
    return held


def _blocks(queries: int, keys: int) -> int:
    """Return the size of the score blocks that the CPU kernel's threads hold."""
    split = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return torch.get_num_threads() * min(split, queries) * min(512, keys)


_WORKSPACE: list[Tensor] = []
"""Workspace of the backward kernel that runs."""


class _Workspace(torch.autograd.Function):
    """In the backward pass: allocate a workspace of (size, dtype) until `_Release`."""

    @staticmethod
    def forward(ctx, out: Tensor, sizes: list[tuple[int, torch.dtype]]) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.sizes = sizes
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        _WORKSPACE.extend(torch.empty(n, dtype=dtype, device="meta") for n, dtype in ctx.sizes)
        return grad, None


class _Release(torch.autograd.Function):
    """In the backward pass: free the workspace."""

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        _WORKSPACE.clear()
        return grads


@dataclass(frozen=True, slots=True)
class Causal:
    """Every token sees itself and all before it."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if widened(q):
            return self(q.float(), k.float(), v.float(), scale).to(q.dtype)
        return _attention(q[None], k[None], v[None], scale)[0]


@dataclass(frozen=True, slots=True)
class Shared:
    """`prefix` tokens, then `rows` rows of equal width; a row sees the prefix and itself."""

    prefix: int
    rows: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if widened(q):
            return self(q.float(), k.float(), v.float(), scale).to(q.dtype)
        n = self.prefix
        own = (self._rows(q), self._behind(k), self._behind(v))
        mixed = _attention(*own, scale, None if runs_on_gpu(q) else _lower_right(*own[:2]))
        flat = mixed.transpose(0, 1).flatten(1, 2)
        if not n:
            return flat
        return torch.cat([Causal()(q[:, :n], k[:, :n], v[:, :n], scale), flat], 1)

    def _rows(self, x: Tensor) -> Tensor:
        """Map [heads, U, hd] to the rows [rows, heads, width, hd]."""
        own = x[:, self.prefix :]
        return own.reshape(x.shape[0], self.rows, -1, x.shape[-1]).transpose(0, 1)

    def _behind(self, x: Tensor) -> Tensor:
        """Map [heads, U, hd] to prefix and rows [rows, heads, prefix + width, hd]."""
        own = self._rows(x)
        if not self.prefix:
            return own
        return torch.cat([x[None, :, : self.prefix].expand(self.rows, -1, -1, -1), own], 2)


def lay_flat(prefix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Causal | Shared]:
    """Flatten prefix [P] and rows [B, T] into U = P + B T tokens.

    Returns ids [U], positions [U] and the attention between them.
    """
    n, (count, width) = prefix.shape[0], rows.shape
    ids = torch.cat([prefix, rows.flatten()])
    positions = torch.arange(n + width, device=ids.device)
    if count == 1:
        return ids, positions, Causal()
    positions = torch.cat([positions[:n], positions[n:].repeat(count)])
    return ids, positions, Shared(n, count)
