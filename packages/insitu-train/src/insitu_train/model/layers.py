"""How one layer of a transformers model runs: precision and memory techniques.

A layer instance gets a `forward` that calls its class's own: with weights cast to the compute dtype for this
call only (as in sharded training, so only the fp32 weights persist), under a checkpoint, with attention
outputs kept, the input offloaded or the MLP tiled. Gradients have the dtype of the stored weights.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from insitu_train.model.base import PLAIN, Attend, MemoryOptions
from insitu_train.model.lora import alive
from insitu_train.model.offload import Offload

ATTENTION_OPS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class _Current(threading.local):
    """What the layer that is computed in this thread uses, also when it is computed again."""

    attend: Attend | None = None
    experts: Tensor | None = None
    """[tokens, k] of this layer, to be chosen by its router; -1 = by its own scores."""


CURRENT = _Current()


class Mode:
    """Settings shared by all layers of one policy."""

    def __init__(self, dtype: torch.dtype, offload: Offload) -> None:
        self.dtype, self.offload = dtype, offload
        """Of activations, and of weights while they are used."""
        self.techniques: MemoryOptions = PLAIN
        self.attend: Attend | None = None
        self.experts: Tensor | None = None
        """[tokens, layers, k] chosen experts of the forward."""


class Raw(nn.Module):
    """Calls a module's class-level `forward`, bypassing the instance's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.returns_more = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.inner).forward(self.inner, *args, **kwargs)


def _cast_call(raw: Raw, dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call with every floating-point parameter in `dtype`; gradients flow to the parameters."""
    cast = {n: p.to(dtype) for n, p in raw.named_parameters() if p.is_floating_point() and p.dtype != dtype}
    return functional_call(raw, cast, args, dict(kwargs)) if cast else raw(*args, **kwargs)


def wrap_layer(layer: nn.Module, mode: Mode, index: int) -> None:
    """Make `layer`, number `index` (its input is the first argument), run as `mode` defines."""
    # weak: a reference cycle would keep the layer until the garbage collector runs
    ref = weakref.ref(layer)
    mlp = getattr(layer, "mlp", None)
    if isinstance(mlp, nn.Module):
        mlp.forward = partial(_mlp, weakref.ref(mlp), mode)

    def forward(*args: Any, **kwargs: Any) -> Any:
        raw = Raw(alive(ref))
        attend, chosen = mode.attend, mode.techniques
        experts = None if mode.experts is None else mode.experts[:, index]

        def compute(*inputs: Any) -> Any:
            before = CURRENT.attend, CURRENT.experts
            CURRENT.attend, CURRENT.experts = attend, experts
            try:
                return _cast_call(raw, mode.dtype, inputs, kwargs)
            finally:
                CURRENT.attend, CURRENT.experts = before

        if not (chosen.checkpoint and torch.is_grad_enabled()):
            return compute(*args)
        context: Callable[[], Any] = (
            partial(create_selective_checkpoint_contexts, ATTENTION_OPS)
            if chosen.save_attention
            else lambda: (nullcontext(), nullcontext())
        )
        kept: AbstractContextManager[Any] = (
            mode.offload.hooks() if chosen.offload_activations else nullcontext()
        )
        with kept:
            return checkpoint(
                compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=context
            )

    layer.forward = forward


def wrap_cast(module: nn.Module, mode: Mode) -> None:
    """Make a module without techniques (a final norm) run in the compute dtype."""
    ref = weakref.ref(module)
    module.forward = lambda *a, **k: _cast_call(Raw(alive(ref)), mode.dtype, a, k)


def wrap_embedding(module: nn.Embedding, mode: Mode) -> None:
    """Make an embedding return the compute dtype.

    Rows are looked up in fp32, where their gradients are summed, and cast. A subclass gets them as a table of
    their own, so that a factor is applied as by a model held in the compute dtype.
    """
    ref = weakref.ref(module)
    # a padding index would name another row of the small table
    module.padding_idx = None

    def forward(ids: Tensor) -> Any:
        held = alive(ref)
        table = F.embedding(ids.flatten(), held.weight).to(mode.dtype)
        if type(held) is nn.Embedding:
            return table.view(*ids.shape, -1)
        at = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return functional_call(Raw(held), {"inner.weight": table}, (at,))

    module.forward = forward  # type: ignore[method-assign, assignment]


def _mlp(ref: weakref.ref[nn.Module], mode: Mode, x: Tensor, *more: Any) -> Any:
    raw = Raw(alive(ref))
    tile = mode.techniques.tile_mlp
    if not tile or x.shape[-2] <= tile or more:
        return raw(x, *more)
    names, weights = zip(*raw.named_parameters(), strict=True)
    tiled: Tensor = _Tiled.apply(raw, names, tile, CURRENT.experts, x, *weights)  # type: ignore[no-untyped-call]
    # of gpt-oss the second is the router's scores, which its layers drop
    return (tiled, None) if raw.returns_more else tiled


def _starts(x: Tensor, tile: int) -> Sequence[int]:
    """Return the starts of the tiles of x.

    On meta tensors three suffice for the peak: all but the last are alike.
    """
    every = range(0, x.shape[-2], tile)
    return sorted({*every[:2], every[-1]}) if x.is_meta else every


@contextmanager
def _tile_of(experts: Tensor | None, at: int, tile: int) -> Iterator[None]:
    """Let a router see the experts of one tile."""
    before = CURRENT.experts
    CURRENT.experts = None if experts is None else experts[at : at + tile]
    try:
        yield
    finally:
        CURRENT.experts = before


class _Tiled(torch.autograd.Function):
    """Computes a per-token function [..., U, d] in tiles; weight gradients are summed in fp32."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, raw: Raw, names: tuple[str, ...], tile: int, experts: Tensor | None, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.raw, ctx.names, ctx.tile, ctx.experts = raw, names, tile, experts
        ctx.save_for_backward(x, *weights)
        parameters = dict(zip(names, weights, strict=True))
        out = x.new_empty(0)
        for at in _starts(x, tile):
            with _tile_of(experts, at, tile):
                piece = functional_call(raw, parameters, (x[..., at : at + tile, :],))
            if isinstance(piece, tuple):
                piece, raw.returns_more = piece[0], True
            # one buffer: a list of pieces and its concatenation would be ref at once
            out = out if at else piece.new_empty(*x.shape[:-1], piece.shape[-1])
            out[..., at : at + tile, :] = piece
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        free = [w.detach().requires_grad_(need) for w, need in zip(weights, wanted, strict=True)]
        parameters = dict(zip(ctx.names, free, strict=True))
        sums = [
            torch.zeros_like(w, dtype=torch.float32) if need else None
            for w, need in zip(weights, wanted, strict=True)
        ]
        dx = torch.empty_like(x)
        for at in _starts(x, ctx.tile):
            part = (..., slice(at, at + ctx.tile), slice(None))
            with torch.enable_grad(), _tile_of(ctx.experts, at, ctx.tile):
                piece = x[part].detach().requires_grad_()
                out = functional_call(ctx.raw, parameters, (piece,))
                out = out[0] if isinstance(out, tuple) else out
            found = torch.autograd.grad(out, [piece, *(w for w in free if w.requires_grad)], grad[part])
            dx[part] = found[0]
            for total, add in zip((s for s in sums if s is not None), found[1:], strict=True):
                total.add_(add)
        back = [None if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]
        return (None, None, None, None, dx, *back)
