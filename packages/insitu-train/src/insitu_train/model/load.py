"""Opens a model folder as the configured policy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from insitu.errors import ConfigError, TrainError
from insitu_train.embedded.model import Qwen3, load_model
from insitu_train.embedded.model_files import model_files
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.model.shard import open_sharded
from insitu_train.options import PolicyConfig


def open_policy(
    folder: Path, config: PolicyConfig, device: torch.device | None = None, mesh: Any = None
) -> Qwen3 | HfPolicy:
    """Open the model. device: one from `device_of`; None = the first of the configured kind.

    mesh: of ranks that keep a part each. Raises InsituError when the folder does not hold such a model or the
    device is missing.
    """
    if config.kind == "builtin":
        if config.replay:
            raise ConfigError('engine.replay_experts: the built-in model has no experts; policy.kind = "hf"')
        return load_model(folder)
    device = device or _device(config.device)
    lora, dtype = config.lora, _dtype(config.dtype, device)
    if lora is not None and lora.merged == "sampler":
        # in float32 the sum is exact enough unrounded
        lora = lora.changed(merged="bfloat16" if dtype == torch.bfloat16 else "")
    if lora is not None and lora.merged == "auto":
        with model_files(TrainError, f"load model {folder}"):
            lora = lora.changed(merged=start_dtype(folder))
    opened = open_hf if mesh is None else partial(open_sharded, mesh=mesh)
    return opened(
        folder,
        device=device,
        dtype=dtype,
        lora=lora,
        rows=config.rows,
        replay=config.replay,
    )


def device_of(config: PolicyConfig, rank: int, ranks: int, here: int = 0) -> torch.device | None:
    """Return a rank's own device; None = no choice to make. Raises ConfigError.

    rank: its number on its machine, which has `here` of all `ranks`; 0 = all.
    """
    if config.kind == "builtin" or ranks == 1:
        return None
    device = _device(config.device)
    if device.type == "cpu":
        return device
    if (needed := here or ranks) > (present := torch.cuda.device_count()):
        raise ConfigError(f"train.ranks = {needed}: each rank needs a GPU of its own, torch sees {present}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def start_dtype(assets: Path) -> Literal["float32", "bfloat16"]:
    """Return the dtype of a model folder's weights by its config.json."""
    config = json.loads((assets / "config.json").read_text())
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "float32" if named == "float32" else "bfloat16"


def _device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("policy.device cuda: torch sees no GPU here")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
