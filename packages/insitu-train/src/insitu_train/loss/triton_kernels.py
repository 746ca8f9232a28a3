"""Triton kernels (3.6) of the head: one program per row.

`absorb` turns a chunk of float32 logits into exponentials and running sums in one launch; `settle` rescales
chunks whose reference moved, which is rare, without a device sync. TRITON_INTERPRET=1 runs both on a CPU.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from insitu_train.loss.chunked_logits import SLACK, Out, Stats, TorchBackend

BLOCK = 1024
"""Columns held in registers at once."""


@triton.jit
def _absorb(
    x_ptr, x_stride, e_ptr, e_stride, target_ptr,
    ref_ptr, total_ptr, moment_ptr, top_ptr, chosen_ptr, mark_ptr, start, by,
    width: tl.constexpr, slack: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, e_row = x_ptr + row * x_stride, e_ptr + row * e_stride
    column = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    for lo in range(0, width, BLOCK):
        x = tl.load(x_row + lo + column, mask=lo + column < width, other=-float("inf"))
        peak = tl.maximum(peak, x)
    high = tl.max(peak, 0) * by
    before, seen = tl.load(ref_ptr + row), tl.load(total_ptr + row)
    ref = tl.where(high > before + slack, high, before)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for lo in range(0, width, BLOCK):
        inside = lo + column < width
        x = tl.load(x_row + lo + column, mask=inside, other=0.0) * by - ref
        e = tl.where(inside, tl.exp(x), 0.0)
        total += e
        moment += tl.where(inside, e * x, 0.0)
        if STORE:
            tl.store(e_row + lo + column, e.to(e_ptr.dtype.element_ty), mask=inside)
    # an empty row has nothing to rescale, and -inf - -inf is nan
    gap = tl.where(seen > 0, before - ref, 0.0)
    keep = tl.exp(gap)
    moved = keep * (tl.load(moment_ptr + row) + gap * seen) + tl.sum(moment, 0)
    tl.store(moment_ptr + row, moved)
    tl.store(total_ptr + row, keep * seen + tl.sum(total, 0))
    tl.store(ref_ptr + row, ref)
    tl.store(mark_ptr + row, ref)
    tl.store(top_ptr + row, tl.maximum(tl.load(top_ptr + row), high))
    at = tl.load(target_ptr + row) - start
    here = (at >= 0) & (at < width)
    found = tl.load(x_row + tl.where(here, at, 0)) * by
    tl.store(chosen_ptr + row, found, mask=here)


@triton.jit
def _settle(
    e_ptr, e_stride, mark_ptr, mark_stride, ref_ptr, vocab, columns: tl.constexpr, BLOCK: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mark, ref = tl.load(mark_ptr + chunk * mark_stride + row), tl.load(ref_ptr + row)
    if mark != ref:
        factor = tl.exp(mark - ref)
        end = tl.minimum((chunk + 1) * columns, vocab)
        for lo in range(0, columns, BLOCK):
            column = chunk * columns + lo + tl.arange(0, BLOCK)
            at = e_ptr + row * e_stride + column
            e = tl.load(at, mask=column < end, other=0.0).to(tl.float32) * factor
            tl.store(at, e.to(e_ptr.dtype.element_ty), mask=column < end)


class TritonBackend(TorchBackend):
    """The same by the kernels above."""

    def absorb(
        self,
        x: Tensor,
        out: Out,
        start: int,
        targets: Tensor,
        stats: Stats,
        mark: Tensor,
        by: float,
    ) -> None:
        e = x if out is None else out
        _absorb[(x.shape[0],)](
            x, x.stride(0), e, e.stride(0), targets, stats.ref, stats.total, stats.moment, stats.top,
            stats.chosen, mark, start, by, width=x.shape[1], slack=SLACK, STORE=out is not None, BLOCK=BLOCK,
        )  # fmt: skip

    def settle(self, out: Tensor, marks: Tensor, ref: Tensor, columns: int) -> None:
        _settle[out.shape[0], marks.shape[0]](
            out, out.stride(0), marks, marks.stride(0), ref, out.shape[1], columns=columns, BLOCK=BLOCK
        )
