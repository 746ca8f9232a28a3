"""Low-rank adapters on chosen linear layers (arXiv 2106.09685): W x + (alpha / rank) B A x, W frozen.

A and B are parameters of the linear module itself, so whatever casts, shards or checkpoints its layer takes
them along. Files and names are those of PEFT, which vLLM and SGLang load. Used by hf.py.

Where an engine gets W + (alpha / rank) B A instead of A and B (`Lora.merged`), the forward computes with that
sum rounded as the engine holds it, so the policy that is trained is the one that samples: an update below
half a unit in the last place of W changes neither, and adds up in A and B until it does.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from insitu.engines.embedded.model_files import model_files
from insitu.errors import TrainError
from insitu.training.options import Lora

M = TypeVar("M", bound=nn.Module)
A, B = "lora_A", "lora_B"
USUAL = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"
)  # fmt: skip
"""Matrices of attention and MLP, under the names that architectures have for them."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"


def described(lora: Lora, base: str) -> Mapping[str, object]:
    """adapter_config.json as PEFT writes it; `base` is the folder of the frozen model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def add_lora(model: nn.Module, layers: Sequence[nn.Module], lora: Lora, dtype: torch.dtype) -> Lora:
    """Freeze the model, keep it in `dtype` and give its decoder layers adapters in fp32, which change nothing
    at first. Returns `lora` with its targets named.

    Raises TrainError when a target is not a linear layer in each of `layers`.
    """
    lora = replace(lora, targets=_targets(model, layers, lora))
    model.requires_grad_(False)
    keep_in(model, dtype)
    generator = torch.Generator().manual_seed(0)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in lora.targets and isinstance(module, nn.Linear):
            _adapt(module, lora, generator)
    return lora


def _targets(model: nn.Module, layers: Sequence[nn.Module], lora: Lora) -> tuple[str, ...]:
    """Those that are asked for, or all of USUAL that each layer has."""
    linear = [
        {name.rpartition(".")[2] for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        for layer in layers
    ]
    usable = set.intersection(*linear)
    found = lora.targets or tuple(name for name in USUAL if name in usable)
    for name in found:
        if name not in usable:
            having = sum(name in names for names in linear)
            where = f"only {having} of {len(layers)} layers have" if having else "no layer has"
            raise TrainError(
                f"policy.lora_targets: of {type(model).__name__} {where} a linear layer {name}"
                f"{_experts(layers, name)}; every layer has {', '.join(sorted(usable)) or 'none'}"
            )
    if not found:
        raise TrainError(
            f"policy.lora_targets: {type(model).__name__} has no linear layers with one of the usual names:"
            f" {', '.join(USUAL)}"
        )
    return found


def _experts(layers: Sequence[nn.Module], name: str) -> str:
    """Why there is none, where it is a tensor of all experts."""
    held = {n.rpartition(".")[2] for layer in layers for n, p in layer.named_parameters() if p.dim() == 3}
    fused = sorted(n for n in held if name.removesuffix("_proj") in n)
    return f" ({fused[0]} is one tensor of all experts, which gets no adapter)" if fused else ""


def keep_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert every weight, and no buffer: the frequencies of positions must stay as exact as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _adapt(module: nn.Linear, lora: Lora, generator: torch.Generator) -> None:
    device = module.weight.device
    bound = module.in_features**-0.5
    down = torch.empty(lora.rank, module.in_features).uniform_(-bound, bound, generator=generator)
    module.register_parameter(A, nn.Parameter(down.to(device)))
    module.register_parameter(B, nn.Parameter(torch.zeros(module.out_features, lora.rank, device=device)))
    # weak: a module that its own attribute holds would live until the garbage collector comes by
    module.forward = partial(_forward, weakref.ref(module), lora)  # type: ignore[method-assign]


def _forward(held: weakref.ref[nn.Linear], lora: Lora, x: Tensor) -> Tensor:
    module, scale = alive(held), lora.alpha / lora.rank
    # not get_parameter: while a layer runs in another type they are plain tensors
    down, up = getattr(module, A), getattr(module, B)
    if lora.merged:
        out: Tensor = _Merged.apply(lora, x, module.weight, module.bias, down, up)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, module.weight, module.bias) + scale * F.linear(F.linear(x, down), up)


def merged_weight(lora: Lora, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """W + (alpha / rank) B A, added in fp32 and rounded to the type that the engine holds; in W's type.

    A and B count as they do in the forward, which runs in W's type, so that both sides get the same bits."""
    low = (up.to(weight.dtype).float() @ down.to(weight.dtype).float()) * (lora.alpha / lora.rank)
    whole = weight.float() + low
    kept = getattr(torch, lora.merged) if lora.merged else weight.dtype
    return whole.to(kept).to(weight.dtype)


class _Merged(torch.autograd.Function):
    """A linear layer with `merged_weight`; gradients of A and B are those of the sum before it is rounded.
    The sum is made again in the backward pass: kept, it would double the frozen weights."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, lora: Lora, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor
    ) -> Tensor:
        ctx.lora = lora
        ctx.save_for_backward(x, weight, down, up)
        return F.linear(x, merged_weight(lora, weight, down, up), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, weight, down, up = ctx.saved_tensors
        scale = ctx.lora.alpha / ctx.lora.rank
        g, tokens = grad.flatten(0, -2), x.flatten(0, -2)
        d_up = scale * (g.T @ (tokens @ down.T))
        d_down = scale * ((g @ up).T @ tokens)
        return None, grad @ merged_weight(ctx.lora, weight, down, up), None, None, d_down, d_up


def alive(held: weakref.ref[M]) -> M:
    """The module whose own `forward` this is called from."""
    module = held()
    if module is None:
        raise TrainError("a layer ran after its model was dropped")
    return module


def adapter_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters among a model's parameters, under PEFT's names."""
    return {f"{_PREFIX}{n}{_SUFFIX}": t for n, t in named.items() if n.endswith((A, B))}


def merged(model: nn.Module, lora: Lora, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own tensors, given its `state` dict: adapters added to their matrices (`merged_weight`)."""
    found = {n: t.detach() for n, t in state.items() if not n.endswith((A, B))}
    for name, module in model.named_modules():
        if A in module._parameters and isinstance(module, nn.Linear):
            down, up = state[f"{name}.{A}"].detach(), state[f"{name}.{B}"].detach()
            found[f"{name}.weight"] = merged_weight(lora, state[f"{name}.weight"].detach(), down, up)
    return found


def save_adapter(named: Mapping[str, Tensor], lora: Lora, base: str, folder: Path) -> None:
    """Write adapters as PEFT does. Raises TrainError."""
    with model_files(TrainError, f"save adapters {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {n: t.detach().cpu().contiguous() for n, t in adapter_tensors(named).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(described(lora, base), indent=2, sort_keys=True) + "\n")


def read_adapter(lora: Lora, folder: Path) -> dict[str, Tensor]:
    """Adapters by parameter name. Raises TrainError when they are of another rank, scale or choice."""
    with model_files(TrainError, f"load adapters {folder}"):
        held = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    same = ("r", "lora_alpha", "target_modules")
    wanted = described(lora, "")
    if any(held.get(key) != wanted[key] for key in same):
        raise TrainError(f"{folder} holds other adapters: { {key: held.get(key) for key in same} }")
    return {n.removeprefix(_PREFIX).removesuffix(_SUFFIX): t for n, t in tensors.items()}
