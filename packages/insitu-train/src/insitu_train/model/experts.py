"""Replays a sampler's choice of experts in the routers of a model of transformers.

In bfloat16 sampler and trainer choose other experts for a token near a tie, whose log-probability then
differs. Every router of transformers chooses by one `torch.topk` over its scores; while experts are replayed
that call gives the sampler's. What the router makes of them, their weights and the gradients, stays its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from insitu.errors import TrainError
from insitu_train.model.layers import CURRENT, Raw
from insitu_train.model.lora import alive

if TYPE_CHECKING:
    from insitu_train.model.hf import HfPolicy

_TOPK = (torch.topk, torch.Tensor.topk)


class _Choice(TorchFunctionMode):
    """Replaces the choice of one router by `experts` [tokens, k], and counts the choices."""

    def __init__(self, experts: Tensor, count: int) -> None:
        super().__init__()
        self._experts, self._count = experts, count
        self.seen = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        # Groups of experts are chosen among fewer scores, or of more dimensions.
        if function not in _TOPK or args[0].dim() != 2 or args[0].shape[1] != self._count:
            return found
        own = found.indices
        if own.shape != self._experts.shape:
            raise TrainError(
                f"a router chooses {own.shape[1]} experts for {own.shape[0]} tokens, the sampler chose"
                f" {self._experts.shape[1]} for {self._experts.shape[0]}"
            )
        self.seen += 1
        given = self._experts.to(own.device, own.dtype)
        chosen = torch.where(given < 0, own, given)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


def routers(layer: nn.Module) -> list[nn.Module]:
    """Return the routers of a decoder layer."""
    return [module for module in layer.modules() if _experts_of(module)]


def route(layers: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Wrap the routers of decoder layers; return the numbers of layers and of experts.

    None where there is none, or where experts have no router that is known.
    """
    counts = set()
    for layer in layers:
        found = routers(layer)
        experts = any(p.dim() == 3 and "experts." in name for name, p in layer.named_parameters())
        if len(found) != experts:
            return None
        counts |= {_experts_of(router) for router in found}
    if len(counts) != 1:
        return None
    for layer in layers:
        for router in routers(layer):
            wrap_router(router)
    return len(layers), counts.pop()


def _experts_of(module: nn.Module) -> int:
    """Return the number of experts that a router chooses among; 0 for any other module."""
    count, weight = getattr(module, "num_experts", None), getattr(module, "weight", None)
    if type(count) is not int or type(getattr(module, "top_k", None)) is not int:
        return 0
    return count if isinstance(weight, nn.Parameter) and weight.shape[0] == count else 0


def wrap_router(router: nn.Module) -> None:
    """Make a router choose the experts of `CURRENT`, where it has some."""
    ref, count = weakref.ref(router), _experts_of(router)

    def forward(*args: Any, **kwargs: Any) -> Any:
        raw = Raw(alive(ref))
        if CURRENT.experts is None:
            return raw(*args, **kwargs)
        with _Choice(CURRENT.experts, count) as choice:
            found = raw(*args, **kwargs)
        if choice.seen != 1:
            raise TrainError(f"{type(raw.inner).__name__} does not choose its experts by one torch.topk")
        return found

    router.forward = forward


def probe_replay(policy: HfPolicy) -> None:
    """Run some tokens through given experts. Raises TrainError where a router does not take them."""
    ids = torch.arange(4, device=policy.device) % policy.vocab_size
    layers, _ = policy.routed or (0, 0)
    width = max((int(router.top_k) for layer in policy.layers for router in routers(layer)), default=0)  # type: ignore[arg-type]
    experts = torch.arange(width, dtype=torch.int16).expand(len(ids), layers, width)
    with torch.no_grad(), replayed(policy, experts):
        policy.hidden(ids[:0], ids[None])


@contextmanager
def replayed(policy: HfPolicy, experts: Tensor) -> Iterator[None]:
    """Run forwards with these experts [tokens, layers, k]. Raises TrainError where the model has others."""
    if not policy.routed:
        raise TrainError(
            f"engine.replay_experts: {type(policy.model).__name__} has no routers that take a choice of"
            " experts"
        )
    layers, count = policy.routed
    if experts.shape[1] != layers or int(experts.max()) >= count:
        raise TrainError(
            f"the sampler chose expert {int(experts.max())} in {experts.shape[1]} layers, the trained model"
            f" has {count} in {layers}: another model"
        )
    policy.mode.experts = experts.to(policy.device)
    try:
        yield
    finally:
        policy.mode.experts = None
