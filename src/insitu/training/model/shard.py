"""One model of transformers over several processes, each holding a part of every weight (FSDP2).

Every layer is a unit of `fully_shard`: its weights are gathered in the compute type when it runs, forward and
backward, and its gradients are added up and cut apart again in float32. What lies outside of layers
(embeddings, head, last norm) is one more unit, gathered in float32 from the forward to the end of the
backward, because the head works on its weight and its gradient directly. Gradients are sums over ranks, as
the planner's weights ask. On CPUs by gloo, tested; on GPUs by NCCL, not yet run. Used by learner/ranks.py,
checkpoints and the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from insitu.training.model.hf import HfPolicy, decoder_layers


class _Root(nn.Module):
    """What FSDP takes for the model: its forward is the policy's, so the model's own class stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def shard(policy: HfPolicy, mesh: Any) -> None:
    """Keep of the policy's weights this rank's part only. mesh: a DeviceMesh of one dimension.

    All ranks call it, with the same weights, before an optimiser is made. From then on every forward and
    backward is a conversation of all of them.
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
            # gloo has no other, and 1 / 1 needs none
            module.set_force_sum_reduction_for_comms(True)
    policy.around, policy.rest, policy.shards = root, root.reshard, int(mesh.size())


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks on the host; one that is not sharded as it is. All ranks call it."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    return tensor if gather is None else gather().cpu()


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """`whole` of each, in order, one after the other. keep: else this rank only gives its parts."""
    found = {}
    for name, tensor in tensors.items():
        value = whole(tensor)
        if keep:
            found[name] = value
    return found


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `target`; all of it where that is not sharded."""
    if not hasattr(target, "full_tensor") or hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    placed: Any = target
    # src_data_rank=None: every rank has the whole tensor, so nothing is sent
    return distribute_tensor(
        tensor.to(placed.device), placed.device_mesh, placed.placements, src_data_rank=None
    )
