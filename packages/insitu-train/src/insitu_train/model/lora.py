"""Low-rank adapters on linear layers (arXiv 2106.09685): W x + (alpha / rank) B A x, W frozen.

A and B are parameters of the linear module itself, so casts, shards and checkpoints of its layer include
them. Files and names are those of PEFT, which vLLM and SGLang load.

Where an engine receives W + (alpha / rank) B A instead of A and B (`Lora.merged`), the forward computes with
that sum rounded to the engine's dtype, so the trained policy is the sampling one: an update below half a unit
in the last place of W changes neither, and accumulates in A and B.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from insitu.errors import TrainError
from insitu_train.embedded.model_files import StoredModel, model_files
from insitu_train.options import Lora

M = TypeVar("M", bound=nn.Module)
A, B = "lora_A", "lora_B"
USUAL = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z",
    "in_proj", "out_proj",
)  # fmt: skip
"""Names of attention and MLP matrices across architectures, of latent attention and of linear attention."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"


def _described(lora: Lora, base: str) -> Mapping[str, object]:
    """Return adapter_config.json as PEFT writes it. base: folder of the frozen model."""
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
    """Freeze the model, keep it in `dtype` and add fp32 adapters to its decoder layers.

    The adapters have no effect initially. Returns `lora` with its targets named. Raises TrainError when a
    target is not a linear layer, or is a tensor of all experts in one of `layers`.
    """
    lora = lora.changed(targets=_targets(model, layers, lora))
    model.requires_grad_(False)
    keep_in(model, dtype)
    for name, start in starts(model, lora).items():
        place, _, key = name.rpartition(".")
        module = model.get_submodule(place)
        module.register_parameter(key, nn.Parameter(start.to(module.get_parameter("weight").device)))
        # weak: a reference cycle would keep the module until the garbage collector runs
        module.forward = partial(_forward, weakref.ref(module), lora)  # type: ignore[arg-type]
    return lora


def starts(model: nn.Module, lora: Lora) -> dict[str, Tensor]:
    """Return the initial adapters by parameter name, the same ones each time, on the host."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in lora.targets and isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            down = torch.empty(lora.rank, module.in_features).uniform_(-bound, bound, generator=generator)
            found[f"{name}.{A}"] = down
            found[f"{name}.{B}"] = torch.zeros(module.out_features, lora.rank)
    return found


def _targets(model: nn.Module, layers: Sequence[nn.Module], lora: Lora) -> tuple[str, ...]:
    """Return the configured targets, or those of USUAL that the layers have.

    Layers of a hybrid have different ones; a name that stands for fused experts in some layer is no target.
    """
    linear = [
        {name.rpartition(".")[2] for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        for layer in layers
    ]
    every = set.union(*linear)
    usable = sorted(name for name in every if not _experts(layers, linear, name))
    usual = tuple(name for name in USUAL if name in usable)
    for name in lora.targets:
        if name not in usable:
            having = sum(name in names for names in linear)
            where = f"only {having} of {len(layers)} layers have" if having else "no layer has"
            raise TrainError(
                f"policy.lora_targets: {type(model).__name__}: {where} a linear layer {name}"
                f"{_experts(layers, linear, name)}; there are {', '.join(usable) or 'none'}:"
                f" set policy.lora_targets = {json.dumps(usual)}, or policy.lora_rank = 0 for all weights"
            )
    if not (lora.targets or usual):
        raise TrainError(
            f"policy.lora_targets: {type(model).__name__} has no linear layers with one of the usual names:"
            f" choose among {', '.join(usable)}"
        )
    return lora.targets or usual


def _experts(layers: Sequence[nn.Module], linear: Sequence[set[str]], name: str) -> str:
    """Return a hint when some layer has one tensor of all experts in place of such linear layers."""
    for layer, names in zip(layers, linear, strict=True):
        held = {n.rpartition(".")[2] for n, p in layer.named_parameters() if p.dim() == 3}
        fused = sorted(n for n in held if n == name or name.removesuffix("_proj") in n.split("_"))
        if fused and name not in names:
            return f" ({fused[0]} is one tensor of all experts, without adapter support)"
    return ""


def keep_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert every weight but no buffer: rotary frequencies must keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _forward(held: weakref.ref[nn.Linear], lora: Lora, x: Tensor) -> Tensor:
    module, scale = alive(held), lora.alpha / lora.rank
    # not get_parameter: in another dtype they are plain tensors (functional_call)
    down, up = getattr(module, A), getattr(module, B)
    if lora.merged:
        out: Tensor = _Merged.apply(lora, x, module.weight, module.bias, down, up)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, module.weight, module.bias) + scale * F.linear(F.linear(x, down), up)


def merged_weight(lora: Lora, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return W + (alpha / rank) B A, added in fp32, rounded to the engine's dtype, in W's dtype.

    A and B are first rounded to W's dtype, as in the forward, so that both sides get the same bits.
    """
    low = (up.to(weight.dtype).float() @ down.to(weight.dtype).float()) * (lora.alpha / lora.rank)
    whole = weight.float() + low
    kept = getattr(torch, lora.merged) if lora.merged else weight.dtype
    return whole.to(kept).to(weight.dtype)


class _Merged(torch.autograd.Function):
    """A linear layer with `merged_weight`; A and B get the gradients of the unrounded sum.

    The sum is recomputed in the backward pass: saving it would double the frozen weights.
    """

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
    """Return the referenced module."""
    module = held()
    if module is None:
        raise TrainError("a layer ran after its model was dropped")
    return module


def adapter_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters among a model's parameters, under PEFT's names."""
    return {f"{_PREFIX}{n}{_SUFFIX}": t for n, t in named.items() if n.endswith((A, B))}


def merged(model: nn.Module, lora: Lora, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a `state_dict` with adapters merged into their matrices (`merged_weight`)."""
    found = {n: t.detach() for n, t in state.items() if not n.endswith((A, B))}
    for name, module in model.named_modules():
        if f"{name}.{A}" in state and isinstance(module, nn.Linear):
            down, up = state[f"{name}.{A}"].detach(), state[f"{name}.{B}"].detach()
            # on the host: a second model would not fit beside the first
            found[f"{name}.weight"] = merged_weight(lora, state[f"{name}.weight"].detach(), down, up).cpu()
    return found


def stored_adapter(named: Mapping[str, Tensor], lora: Lora, base: str) -> StoredModel:
    """Return adapters as the files that PEFT writes."""
    config = json.dumps(_described(lora, base), indent=2, sort_keys=True) + "\n"
    return StoredModel(name=WEIGHTS, tensors=adapter_tensors(named), texts={CONFIG: config})


def read_adapter(lora: Lora, folder: Path) -> dict[str, Tensor]:
    """Return adapters by parameter name. Raises TrainError for another rank, alpha or choice of targets."""
    with model_files(TrainError, f"load adapters {folder}"):
        held = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    same = ("r", "lora_alpha", "target_modules")
    held["target_modules"] = sorted(held.get("target_modules", ()))  # PEFT writes them in any order
    wanted = _described(lora, "")
    if any(held.get(key) != wanted[key] for key in same):
        raise TrainError(f"{folder} holds different adapters: { {key: held.get(key) for key in same} }")
    return {n.removeprefix(_PREFIX).removesuffix(_SUFFIX): t for n, t in tensors.items()}
