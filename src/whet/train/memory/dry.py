"""The memory of one forward and backward pass, found by running it on tensors that have no content.

The model is built from its configuration alone on torch's meta device and goes through the code that trains:
layers, techniques, attention, head. A dispatch mode counts what is allocated and what is let go, so the peak
is that of the code as it is, for any architecture. What a kernel takes for itself is added where it is known.
Called by predict.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.train.head.objective import kept_gradient
from whet.train.head.tiles import tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Shape of a micro-batch."""

    prefix: int
    """Tokens that all rows share, computed once."""
    rows: int
    width: int
    """Tokens of the longest row behind the prefix."""
    trained: int
    """Positions that the head scores."""

    @property
    def tokens(self) -> int:
        """Tokens that the pass computes."""
        return self.prefix + self.rows * self.width


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors made within it that are still held; `peak` is the most there were."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """known: tensors that are there before and do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {t.untyped_storage()._cdata for t in known}
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class DryHead(torch.autograd.Function):
    """What `objective` of head/ allocates, for hidden [N, d] and weight [V, d] on a CPU or a GPU."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, gpu: bool) -> Tensor:  # type: ignore[no-untyped-def]
        compute = weight.detach().to(hidden.dtype)
        found = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3)]
        d_hidden = torch.empty_like(hidden)
        wanted = weight.requires_grad and kept_gradient(weight) is None
        d_weight = [torch.zeros(weight.shape, dtype=torch.float32, device="meta")] if wanted else []
        _head_pass(hidden, compute, gpu)
        ctx.save_for_backward(d_hidden, *d_weight)
        return found[0].sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        d_hidden, *d_weight = ctx.saved_tensors
        return d_hidden, d_weight[0] if d_weight else None, None


def _head_pass(hidden: Tensor, weight: Tensor, gpu: bool) -> None:
    """One sweep over positions x vocabulary; a CPU has no bf16 product with an fp32 result."""
    if not gpu:
        hidden, weight = hidden.float(), weight.float()
    positions, width = hidden.shape
    cut = tiling(positions, width, weight.shape[0], element=hidden.element_size(), gpu=gpu)
    hidden.new_empty(cut.held, dtype=torch.uint8)
