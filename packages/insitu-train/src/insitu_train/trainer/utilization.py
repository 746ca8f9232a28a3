"""Share of the devices' peak that an update reached: what the model's products need over what was possible.

A token takes 6 operations per trained parameter (2 forward, 4 backward), 4 per frozen one, and 12 per layer,
head width and token that it attends to. What is computed again to save memory, scored without a gradient or
padded does not count, nor does the lookup of embeddings; of experts those count that a token is sent to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from insitu_train.embedded.model import Qwen3
from insitu_train.model.base import Policy
from insitu_train.model.hf import HfPolicy
from insitu_train.plan.step import StepPlan

PEAKS: Mapping[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
"""Operations per second in bfloat16, dense, by the beginning of the device's name: NVIDIA's data sheets."""


def peak_of(name: str) -> float | None:
    """Return the peak of a device by its name; None for one that is not in the table."""
    words = name.replace("-", " ") + " "
    known = [begin for begin in PEAKS if words.startswith(f"{begin} ")]
    return PEAKS[max(known, key=len)] if known else None


def utilization(model: Policy, plan: StepPlan, *, epochs: int, ranks: int, seconds: float) -> float | None:
    """Return the share of the peak of `ranks` equal devices, None where it or the model's shape is not known.

    seconds: time of the update.
    """
    if model.device.type != "cuda" or model.compute_dtype not in (torch.bfloat16, torch.float16):
        return None
    peak = peak_of(torch.cuda.get_device_name(model.device))
    needed = operations(model, plan)
    return None if peak is None or needed is None else epochs * needed / (seconds * ranks * peak)


def operations(model: Policy, plan: StepPlan) -> float | None:
    """Return the operations of one epoch of a plan; None for a model whose shape is not known."""
    if not isinstance(model, HfPolicy | Qwen3):
        return None
    config: Any = model.config if isinstance(model, Qwen3) else model.model.config.get_text_config()
    width = _attention_width(config)
    per_token = 0.0
    for name, parameter in model.named_parameters():
        share = _share(name, parameter, config)
        if width is None or share is None:
            return None
        if "embed" not in name or parameter is model.head_weight:
            per_token += (6 if parameter.requires_grad else 4) * share * parameter.numel()
    tokens, pairs = map(sum, zip(*_sizes(plan), strict=True))
    return per_token * tokens + 12 * (width or 0) * pairs


def _attention_width(config: Any) -> int | None:
    """Return layers with full attention x heads x width of a head; None where the config names no heads."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [kind for kind in kinds if kind == "full_attention"]
    return len(layers) * int(heads) * int(head)


def _share(name: str, parameter: torch.Tensor, config: Any) -> float | None:
    """Return the share of a parameter that a token meets: less than 1 for experts; None where not known."""
    if parameter.dim() < 3 or "experts." not in name:
        return 1.0
    chosen = getattr(config, "num_experts_per_tok", None)
    return None if not chosen else float(chosen) / parameter.shape[0]


def _sizes(plan: StepPlan) -> Iterator[tuple[int, float]]:
    """Yield tokens and pairs of a token and one that it attends to, of each pass; a shared prefix once."""
    for batch in plan.batches:
        lengths = [len(plan.rows[row].ids) for row in batch.rows]
        if batch.layout == "tree":  # the pairs of the rows, less by what the tree shares
            yield batch.tokens, sum(n * n / 2 for n in lengths) * batch.tokens / sum(lengths)
        else:
            own = [(n - batch.prefix, (n * n - batch.prefix**2) / 2) for n in lengths]
            yield batch.prefix + sum(n for n, _ in own), batch.prefix**2 / 2 + sum(pairs for _, pairs in own)
