"""Peak memory of one forward and backward pass, by running it on meta tensors.

The model is built on torch's meta device from its configuration and runs the code that trains. A dispatch
mode counts allocations and frees, so the peak follows the code for any architecture. The workspace of known
kernels is added.
The peak of a stack of equal layers is predicted from two short stacks. It is at one of the two ends of the
backward pass: until the top layer's backward ends, memory grows by what each layer keeps; from the start of
the last but one on, by its gradients. Each end is linear in the number of layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from insitu_train.attention.parts import RowSplit
from insitu_train.attention.rows import _blocks as score_blocks
from insitu_train.attention.tree import Piece
from insitu_train.loss.chunked_logits import cut_of
from insitu_train.loss.fused_head import kept_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Size of the pieces of a tree's attention (attention/tree.py)."""

    causal: int
    """Tokens of the longest causal piece."""
    queries: int
    """Of the largest whole piece; 0 = none."""
    keys: int
    whole: int
    """Queries of all whole pieces."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> AttentionShape:
        causal = max(p.q1 - p.q0 for p in pieces if p.causal)
        sizes = [(p.q1 - p.q0, p.k1 - p.k0) for p in pieces if not p.causal]
        # a piece holds its output, and keys and values with their gradients
        queries, keys = max(sizes, key=lambda size: size[0] + 2 * size[1], default=(0, 0))
        return cls(causal=causal, queries=queries, keys=keys, whole=sum(q for q, _ in sizes))

    def pieces(self, tokens: int) -> tuple[Piece, ...]:
        """Return pieces of this shape over so many tokens, with as many queries in all."""
        own = [(at, min(tokens, at + self.causal)) for at in range(0, tokens, self.causal)]
        found = [Piece(a, b, a, b, True) for a, b in own]
        left, most = self.whole, min(self.queries, tokens)
        while left > 0 and most:
            found.append(Piece(tokens - min(most, left), tokens, 0, min(self.keys, tokens), False))
            left -= most
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Shape of a micro-batch."""

    prefix: int
    """Shared tokens, computed once."""
    rows: int
    width: int
    """Tokens of the longest row after the prefix."""
    trained: int
    """Positions that the head scores."""
    tree: AttentionShape | None = None
    """Attention of a tree's tokens (then one row) where it is not one kernel."""
    parts: int = 1
    """Ranks over which the tokens of one row are spread; `trained` is then of one of them."""

    @property
    def tokens(self) -> int:
        """Tokens that the pass computes, on one rank."""
        if self.parts > 1:
            return 2 * RowSplit(self.width, self.parts).chunk
        return self.prefix + self.rows * self.width


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of live tensors allocated within it: now, and the peak of each part of the pass."""

    def __init__(self, known: Iterable[Tensor] = (), kernels: str = "") -> None:
        """Count from zero.

        known: existing tensors that do not count. kernels: device whose attention kernels are called by name,
        so that their workspace counts.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels
        self._known = {t.untyped_storage()._cdata for t in known}
        self._sizes: dict[int, int] = {}
        self.now = 0
        self.peaks = [0]
        """Peak bytes of each part."""

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def part(self) -> None:
        """Start another part."""
        self.peaks.append(self.now)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = _grouped(func, args) if func in _GROUPED else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if self._kernels and func in _PIECES:
            own = _workspace(args[0], args[1], backward=func is _PIECES[1], gpu=self._kernels == "cuda")
            self.peaks[-1] = max(self.peaks[-1], self.now + own)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peaks[-1] = max(self.peaks[-1], self.now)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


_PIECES = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Kernels that TreeAttend calls for meta tensors of any device."""


def _workspace(queries: Tensor, keys: Tensor, *, backward: bool, gpu: bool) -> int:
    """Return the bytes of a piece's kernel workspace; both tensors [1, heads, tokens, head_dim]."""
    if gpu:
        # fp32 sums of dq and of the softmax
        return 4 * (queries.numel() + queries.numel() // queries.shape[-1]) if backward else 0
    blocks = 4 * score_blocks(queries.shape[2], keys.shape[2])
    return 2 * blocks + queries.nbytes if backward else blocks


_GROUPED = frozenset({torch.ops.aten._grouped_mm.default})


def _grouped(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Return the result of a grouped matrix product (tokens sorted by expert), or of its gradient.

    torch's meta kernel requires bf16, which its real kernels do not.
    """
    a, b = args[:2]
    groups = args[2].shape[0] if a.dim() == b.dim() == 2 else 0
    shape = (groups, a.shape[0], b.shape[1]) if groups else (*a.shape[:-1], b.shape[-1])
    return torch.empty(shape, dtype=a.dtype, device="meta")


class DryHead(torch.autograd.Function):
    """Allocates what `fused_head.objective` allocates, for hidden [N, d] and weight [V, d]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, gpu: bool) -> Tensor:  # type: ignore[no-untyped-def]
        found = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3)]
        d_hidden = torch.empty_like(hidden)
        wanted = weight.requires_grad and kept_gradient(weight) is None
        d_weight = [torch.zeros(weight.shape, dtype=torch.float32, device="meta")] if wanted else []
        head_pass(hidden, weight, gpu)
        ctx.save_for_backward(d_hidden, *d_weight)
        return found[0].sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        d_hidden, *d_weight = ctx.saved_tensors
        return d_hidden, d_weight[0] if d_weight else None, None


def head_pass(hidden: Tensor, weight: Tensor, gpu: bool) -> None:
    """Allocate the buffers of one tile, with the cast of the weight."""
    hidden.new_empty(cut_of(hidden, weight, gpu=gpu).held, dtype=torch.uint8)


SHORT = (3, 4)
"""Layers of the two stacks."""


def alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers have the same modules and parameters, and enough of them to pay off."""

    def form(layer: nn.Module) -> list[object]:
        kinds: list[object] = [type(m) for m in layer.modules()]
        return kinds + [(n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters()]

    first = form(layers[0])
    return len(layers) > sum(SHORT) and all(form(layer) == first for layer in layers[1:])


@contextmanager
def only(layers: Sequence[nn.Module], count: int, meter: MemoryMeter) -> Iterator[None]:
    """Run only the first `count` layers; the meter's peaks are split at the ends of the backward."""
    form: list[Any] = []
    hooks = []

    def seen(at: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            hidden: Tensor = out[0] if isinstance(out, tuple) else out
            if at in (1, count - 2) and hidden.requires_grad:
                hidden.register_hook(lambda grad: meter.part())  # type: ignore[no-untyped-call]
            form[:] = [isinstance(out, tuple), out[1:] if isinstance(out, tuple) else ()]

        return hook

    def skip(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden, *form[1]) if form[0] else hidden

    before = [layer.__dict__.get("forward") for layer in layers]
    for at, layer in enumerate(layers):
        if at < count:
            hooks.append(layer.register_forward_hook(seen(at)))
        else:
            layer.forward = skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = forward


def whole(found: Sequence[tuple[Sequence[int], int]], layers: int) -> tuple[int, int]:
    """Return (peak, offloaded bytes) of `layers` layers by extrapolation.

    found: (peaks of the parts, offloaded bytes) of the stacks of SHORT layers.
    """
    (few, few_offloaded), (more, more_offloaded) = found
    step = SHORT[1] - SHORT[0]

    def at(a: int, b: int) -> int:
        return a + (b - a) * (layers - SHORT[0]) // step

    ends = [at(few[0], more[0]), at(few[-1], more[-1])]
    return max(ends), at(few_offloaded, more_offloaded)
