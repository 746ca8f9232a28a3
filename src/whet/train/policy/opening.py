"""Opens the model folder of a run as the policy that its configuration asks for. Called by the learner."""

from __future__ import annotations

from pathlib import Path

import torch

from whet.engine.embedded_model import Qwen3, load_model
from whet.errors import ConfigError
from whet.train.options import PolicyConfig
from whet.train.policy.hf import HfPolicy, open_hf


def open_policy(folder: Path, config: PolicyConfig) -> Qwen3 | HfPolicy:
    """Raises WhetError when the folder does not hold such a model or the device is not there."""
    if config.kind == "builtin":
        return load_model(folder)
    device = _device(config.device)
    return open_hf(folder, device=device, dtype=_dtype(config.dtype, device), lora=config.lora)


def _device(name: str) -> torch.device:
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError("policy.device cuda: torch sees no GPU here")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
