"""One model of transformers over several processes, each holding a part of every weight (FSDP2).

Each layer is a unit of `fully_shard`: weights are gathered in the compute dtype when it runs, gradients are
reduced and scattered in float32. Everything else (embeddings, head, final norm) is one more unit, gathered in
float32 from the forward to the end of the backward, because the head uses its weight and gradient directly.
Gradients are sums over ranks, as the planner's weights require. Tested on CPUs by gloo; not yet run on GPUs
by NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from insitu.training.model.hf import HfPolicy, decoder_layers


class _Root(nn.Module):
    """The module passed to FSDP; its forward is the policy's, so the model's class is unchanged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def shard(policy: HfPolicy, mesh: Any) -> None:
    """Keep only this rank's part of the policy's weights. mesh: a one-dimensional DeviceMesh.

    All ranks call it with the same weights, before the optimizer is made. Afterwards every forward and
    backward is a collective operation.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    dtype = policy.mode.dtype
    rounded = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=rounded)
    root: Any = _Root(policy.model)
    fully_shard(root, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo supports sums only
            module.set_force_sum_reduction_for_comms(True)
    policy.around, policy.rest, policy.shards = root, root.reshard, int(mesh.size())


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on the host; a tensor that is not sharded as it is. All ranks call it."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    return tensor if gather is None else gather().cpu()


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return `whole` of each, one after the other. keep: else this rank only sends its parts."""
    found = {}
    for name, tensor in tensors.items():
        value = whole(tensor)
        if keep:
            found[name] = value
    return found


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor as in `target`; all of it where that is not sharded."""
    if not hasattr(target, "full_tensor") or hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    placed: Any = target
    # src_data_rank=None: every rank has the whole tensor, so nothing is sent
    return distribute_tensor(
        tensor.to(placed.device), placed.device_mesh, placed.placements, src_data_rank=None
    )
