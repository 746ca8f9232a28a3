"""Matrix products of bfloat16 with a float32 result, in the way that this torch offers on this device.

    addmm   one kernel for out += a @ b                  CUDA, torch from 2.10 on (its pull request 167931)
    mm      one for a @ b, which is then added to out    CUDA, torch 2.8 and 2.9: addmm wants one type for all
    cast    float32 copies of the operands               the rest

All sum in float32, so they differ by the order of the sums only. What the latter two hold for it is a band
at a time, small enough for what tiles.BUDGET leaves of a GiB. Called by tiles.py.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Way = Literal["addmm", "mm", "cast"]
BAND = 32 << 20
"""Most bytes of a copy or of a product that is still to be added."""


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or +=, with sums of out's type whatever that of a [M, K] and b [K, N] is; out [M, N]."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        return
    # tensors without content stand for those of a GPU
    way: Way = "addmm" if a.device.type == "meta" else way_of(a.device.type, a.dtype)
    if way == "cast":
        _cast(a, b, out, add=add)
    elif not add:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif way == "addmm":
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        rows = max(1, BAND // (out.itemsize * out.shape[1]))
        for at in range(0, out.shape[0], rows):
            out[at : at + rows] += torch.mm(a[at : at + rows], b, out_dtype=out.dtype)


@cache
def way_of(device: str, dtype: torch.dtype) -> Way:
    """The first way that gives 17 for 1 + 16 x 1 x 1. Tried once per kind of device. Raises OutOfMemoryError:
    that says nothing of what torch can do."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    ways: tuple[Way, ...] = ("addmm", "mm")
    for way in ways:
        out = torch.ones(16, 16, device=device)
        try:
            if way == "addmm":
                torch.addmm(out, ones, ones, out_dtype=out.dtype, out=out)
            else:
                out += torch.mm(ones, ones, out_dtype=out.dtype)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            log.debug("torch %s has no %s of %s on %s: %s", torch.__version__, way, dtype, device, error)
            continue
        if bool((out == 17).all()):
            break
    else:
        way = "cast"
    if way != "addmm":
        log.warning("torch %s: %s products take the way %r on %s", torch.__version__, dtype, way, device)
    return way


def _cast(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    deep = max(1, BAND // (out.itemsize * b.shape[1]))
    rows = max(1, BAND // (out.itemsize * min(deep, b.shape[0])))
    if not add:
        out.zero_()
    for k in range(0, b.shape[0], deep):
        right = b[k : k + deep].to(out.dtype)
        for at in range(0, out.shape[0], rows):
            out[at : at + rows].addmm_(a[at : at + rows, k : k + deep].to(out.dtype), right)
