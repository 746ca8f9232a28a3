"""One model of transformers over several processes, each holding a part of every weight (FSDP2).

Each layer is a unit of `fully_shard`: weights are gathered in the compute dtype when it runs, gradients are
reduced and scattered in float32. Everything else (embeddings, head, final norm) is one more unit, gathered in
float32 from the forward to the end of the backward, because the head uses its weight and gradient directly.
Gradients are sums over ranks, as the planner's weights require. Tested on CPUs by gloo; not yet run on GPUs
by NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from insitu.errors import TrainError
from insitu_train.embedded.model_files import model_files
from insitu_train.model.hf import (
    HfPolicy,
    adopt,
    decoder_layers,
    empty_model,
    open_hf,
    read_config,
    read_model,
)
from insitu_train.model.lora import add_lora, starts
from insitu_train.model.parts import (
    ConvertedFiles,
    LazyTensors,
    PartFiles,
    enough,
    fill,
    first_layers,
    kinds,
    readers,
    rows_of,
    shape_of,
)
from insitu_train.options import Lora


class _Root(nn.Module):
    """The module passed to FSDP; its forward is the policy's, so the model's class is unchanged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def open_sharded(
    folder: Path,
    mesh: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lora: Lora | None = None,
    rows: bool = False,
    replay: bool = False,
) -> HfPolicy:
    """Like `open_hf`, and keep only this rank's part; nothing else of the weights is read or held.

    All ranks call it. Where that is not possible, each reads the whole model first, and a notice says so.
    Raises TrainError.
    """
    options = {"device": device, "dtype": dtype, "rows": rows, "replay": replay}
    with model_files(TrainError, f"load model {folder}"):
        policy = _open_parts(folder, mesh, lora, **options)
    if policy is None:
        policy = open_hf(folder, lora=lora, **options)  # type: ignore[arg-type]
        policy.notices.append(
            f"{folder} cannot be opened in parts (tensors under other names than transformers saves, or a"
            " model that fewer layers change): each rank opens the whole model before it keeps its part"
        )
        shard(policy, mesh)
    return policy


def _open_parts(folder: Path, mesh: Any, lora: Lora | None, **options: Any) -> HfPolicy | None:
    """Return the policy, its weights read in parts; None where the files or the architecture forbid it."""
    config, device, dtype = read_config(folder), options["device"], options["dtype"]
    model = empty_model(config, "eager")
    with PartFiles(folder) as files:
        sources = readers(model, files)
        if sources is None or (checked := _checked(folder, config, model, options)) is None:
            return None
        buffers = {name: buffer.cpu() for name, buffer in checked.model.named_buffers()}
        if any(n not in sources and n not in buffers for n, _ in model.named_buffers()):
            return None
        model.set_attn_implementation(checked.model.config._attn_implementation)
        model.generation_config = checked.model.generation_config
        notices = checked.notices
        del checked
        policy = HfPolicy(model.eval(), dtype=dtype, device=device)
        policy.notices += notices
        if lora is not None:
            policy.lora = add_lora(model, policy.layers, lora, dtype)
            for name, start in starts(model, policy.lora).items():
                sources[name] = partial(_part, start)
        shard(policy, mesh)
        _leave_meta(policy, device)
        fill(policy, sources, buffers)
    return policy


def _part(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


def _checked(folder: Path, config: Any, model: Any, options: Mapping[str, Any]) -> HfPolicy | None:
    """Return the first layers as a policy that has passed the checks of `adopt`, or None.

    They have a layer of every kind. None where a configuration with fewer layers makes other weights, or
    where layers have buffers that no file has: those of one layer need not be another's.
    """
    layers, stored = decoder_layers(model), model.state_dict(keep_vars=True).keys()
    inside = {id(buffer) for layer in layers for buffer in layer.buffers()}
    if any(id(buffer) in inside and name not in stored for name, buffer in model.named_buffers()):
        return None
    found = kinds(config, layers)
    count = enough(found)
    short = first_layers(config, count)
    empty = empty_model(short, "eager")
    if kinds(short, decoder_layers(empty)) != found[:count] or not _shapes(empty) <= _shapes(model):
        return None
    return adopt(read_model(folder, short), **options)


def _shapes(model: nn.Module) -> set[tuple[str, torch.Size]]:
    return {(name, tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def _leave_meta(policy: HfPolicy, device: torch.device) -> None:
    """Give the parts memory on `device`, without content; parameters that were one stay one."""
    model: Any = policy.model
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    root: Any = policy.around
    root.to_empty(device=device)
    for first, *others in shared.values():
        for name in others:
            place, _, key = name.rpartition(".")
            model.get_submodule(place)._parameters[key] = model.get_parameter(first)


def shard(policy: HfPolicy, mesh: Any) -> None:
    """Keep only this rank's part of the policy's weights. mesh: see `Sharded.mesh`.

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
    policy.around, policy.rest, policy.shards = root, root.reshard, int(mesh.size(-1))


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor on its device; a tensor that is not sharded as it is. All ranks call it."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    return tensor if gather is None else gather()


def whole(tensor: Tensor) -> Tensor:
    """Return `full` of a sharded tensor on the host."""
    found = full(tensor)
    return tensor if found is tensor else found.cpu()


def gathered(tensors: Mapping[str, Tensor], *, mine: Collection[str]) -> dict[str, Tensor]:
    """Gather each tensor, one after the other; return `whole` of those that this rank keeps."""
    found = {}
    for name, tensor in tensors.items():
        value = full(tensor)
        if name in mine:
            # a copy of what no rank divides: it may change
            found[name] = value.clone() if value is tensor else value.cpu()
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


def put(target: Tensor, held: Mapping[str, Tensor], name: str) -> None:
    """Copy a whole tensor that is `held` into `target`, of a sharded one this rank's rows only."""
    with torch.no_grad():
        if isinstance(held, LazyTensors) and hasattr(target, "full_tensor"):
            placed: Any = target
            placed.to_local().copy_(held.rows(name, *rows_of(target)))
        else:
            target.copy_(like(held[name], target))


def part_of(held: Mapping[str, Tensor], name: str, target: Tensor | None) -> Tensor:
    """Return a tensor that is `held`; one of a sharded target's shape as this rank's part of it."""
    if target is None or not hasattr(target, "full_tensor") or shape_of(held, name) != tuple(target.shape):
        return held[name]
    made = torch.zeros_like(target, memory_format=torch.preserve_format, requires_grad=False)
    put(made, held, name)
    return made


def stored_parameters(policy: HfPolicy, files: PartFiles, folder: Path) -> Mapping[str, Tensor]:
    """Return the parameters that a sharded policy wrote, each read when it is asked for.

    Read at once are adapters, and a model whose files have its weights in another layout. Raises TrainError
    for another model.
    """
    if policy.lora is not None:
        return policy.read(folder)
    with model_files(TrainError, f"load model {folder}"):
        model = empty_model(read_config(folder), "eager")
        sources = readers(model, files)
    if sources is None:
        return policy.read(folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes != {name: parameter.shape for name, parameter in policy.named_parameters()}:
        raise TrainError(f"{folder} holds a different model from the one being trained")
    return ConvertedFiles(sources, shapes)
