"""A stack of equal layers, run dry as a few of them.

The peak of a pass lies at one of its ends. Up to the end of the top layer's backward, memory grows with each
layer by what it keeps; from the start of that of the last layer but one on, by its gradients; between them
lies a mixture of the two. (With inputs in the host's memory the bottom layer fetches none ahead and takes
less.) So each end is linear in the number of layers, and two short stacks tell the whole. Layers are skipped
in place, whatever the model's code is. Used by predict.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from insitu.training.memory.meta_run import MemoryMeter

SHORT = (3, 4)
"""Layers of the two stacks that are run."""


def alike(layers: Sequence[nn.Module]) -> bool:
    """Whether all layers have the same modules and parameters, and there are enough that it pays."""

    def form(layer: nn.Module) -> list[object]:
        kinds: list[object] = [type(m) for m in layer.modules()]
        return kinds + [(n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters()]

    first = form(layers[0])
    return len(layers) > sum(SHORT) and all(form(layer) == first for layer in layers[1:])


@contextmanager
def only(layers: Sequence[nn.Module], count: int, meter: MemoryMeter) -> Iterator[None]:
    """Within it a forward goes through the first `count` layers alone; the others hand on what they get.
    The meter's peaks are told apart at the two ends of the backward pass."""
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
    """(peak, parked bytes) of `layers` layers from (peaks of the parts, parked bytes) of SHORT ones."""
    (few, few_parked), (more, more_parked) = found
    step = SHORT[1] - SHORT[0]

    def at(a: int, b: int) -> int:
        return a + (b - a) * (layers - SHORT[0]) // step

    ends = [at(few[0], more[0]), at(few[-1], more[-1])]
    return max(ends), at(few_parked, more_parked)
