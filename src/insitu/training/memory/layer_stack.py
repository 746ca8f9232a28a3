"""Predicts the peak memory of a stack of equal layers from dry runs of two short stacks.

The peak is at one of the two ends of the backward pass: until the top layer's backward ends, memory grows by
what each layer keeps; from the start of the last but one on, by its gradients. Each end is linear in the
number of layers. (With offloaded inputs the bottom layer prefetches nothing and takes less.) Layers are
skipped in place, whatever the model's code is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from insitu.training.memory.meta_run import MemoryMeter

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
