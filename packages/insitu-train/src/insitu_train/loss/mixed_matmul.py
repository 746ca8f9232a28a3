"""Matrix products of bfloat16 with a float32 result, by the method that this torch supports on this device.

    addmm   one kernel for out += a @ b                  CUDA, torch >= 2.10 (pull request 167931)
    mm      one for a @ b, which is then added to out    CUDA, torch 2.8 and 2.9: addmm wants one dtype
    cast    float32 copies of the operands               otherwise

All sum in float32 and differ only in the order of the sums. The last two work in bands that fit the rest of a
GiB after chunked_logits.BUDGET. A CPU has float32 operands, which `rounded` lets it multiply as bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Method = Literal["addmm", "mm", "cast"]
BAND = 32 << 20
"""Most bytes of a copy, or of a product that is still to be added."""


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Compute out = a @ b, or +=, accumulating in out's dtype; a [M, K], b [K, N], out [M, N]."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        return
    # meta tensors stand for a GPU's
    method: Method = "addmm" if a.device.type == "meta" else method_of(a.device.type, a.dtype)
    if method == "cast":
        _cast(a, b, out, add=add)
    elif not add:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif method == "addmm":
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        rows = max(1, BAND // (out.itemsize * out.shape[1]))
        for at in range(0, out.shape[0], rows):
            out[at : at + rows] += torch.mm(a[at : at + rows], b, out_dtype=out.dtype)


@contextmanager
def rounded(on: bool = True) -> Iterator[None]:
    """Let a CPU with AMX or AVX-512 round float32 operands to bfloat16 meanwhile; results stay float32.

    By oneDNN, in the whole process; another CPU and torch before 2.9 take no notice.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not on or matmul is None:
        yield
        return
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def method_of(device: str, dtype: torch.dtype) -> Method:
    """Return the first method that computes 17 = 1 + 16 x 1 x 1 correctly; tested once per kind of device.

    Raises OutOfMemoryError, which does not show what torch supports.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    methods: tuple[Method, ...] = ("addmm", "mm")
    for method in methods:
        out = torch.ones(16, 16, device=device)
        try:
            if method == "addmm":
                torch.addmm(out, ones, ones, out_dtype=out.dtype, out=out)
            else:
                out += torch.mm(ones, ones, out_dtype=out.dtype)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            log.debug("torch %s has no %s of %s on %s: %s", torch.__version__, method, dtype, device, error)
            continue
        if bool((out == 17).all()):
            break
    else:
        method = "cast"
    if method != "addmm":
        log.warning("torch %s: %s products use method %r on %s", torch.__version__, dtype, method, device)
    return method


def _cast(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    deep = max(1, BAND // (out.itemsize * b.shape[1]))
    rows = max(1, BAND // (out.itemsize * min(deep, b.shape[0])))
    if not add:
        out.zero_()
    for k in range(0, b.shape[0], deep):
        right = b[k : k + deep].to(out.dtype)
        for at in range(0, out.shape[0], rows):
            out[at : at + rows].addmm_(a[at : at + rows, k : k + deep].to(out.dtype), right)
