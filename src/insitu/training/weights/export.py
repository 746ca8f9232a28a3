"""Writes the trainer's weights as a model folder for an engine, in the learner's process.

The folder appears atomically, with `weights.json`: its version and the checksum of every tensor, which later
verification uses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from insitu.engines.embedded.model_files import model_assets, model_files, share
from insitu.engines.safetensors_file import (
    Manifest,
    StoredTensor,
    read_folder,
    sums_of,
    write_manifest,
    write_tensors,
)
from insitu.errors import TrainError
from insitu.training.model.base import Policy
from insitu.training.model.load import start_dtype
from insitu.training.weights.files import ExportRequest

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_CODES = {"float32": "F32", "bfloat16": "BF16"}


def export(policy: Policy, wanted: ExportRequest, assets: Path) -> Manifest:
    """Write `wanted.folder`, replacing an existing one.

    assets: folder of the start model. Raises TrainError, also for adapters of a policy without any.
    """
    folder = wanted.folder
    fresh = folder.with_name(f".{folder.name}.new")
    with model_files(TrainError, f"publish weights into {folder}"):
        for old in (fresh, folder):
            shutil.rmtree(old, ignore_errors=True)
        fresh.mkdir(parents=True)
        if wanted.adapter:
            manifest = _adapter(policy, fresh, wanted)
        else:
            policy.save_whole(fresh)
            manifest = _rewrite(fresh, wanted, assets)
            for path in model_assets(assets):
                if not (fresh / path.name).exists():
                    shutil.copyfile(path, fresh / path.name)
        share(fresh)
        fresh.rename(folder)
    return manifest


def _adapter(policy: Policy, folder: Path, wanted: ExportRequest) -> Manifest:
    """Write only the adapters: an engine might use a tokenizer beside them."""
    policy.save(folder)
    if not (folder / "adapter_config.json").exists():
        raise TrainError("the policy has no adapters to publish: policy.lora_rank is 0")
    tensors = read_folder(folder)
    if wanted.dtype != "auto":
        tensors = {name: cast(tensor, _CODES[wanted.dtype]) for name, tensor in tensors.items()}
        written = folder / "published.tmp"
        write_tensors(written, tensors)
        written.rename(folder / "adapter_model.safetensors")
    return write_manifest(folder, wanted.version, sums_of(tensors))


def _rewrite(folder: Path, wanted: ExportRequest, assets: Path) -> Manifest:
    """Cast and untie the policy's tensors into one file."""
    config = json.loads((folder / "config.json").read_text())
    dtype = wanted.dtype if wanted.dtype != "auto" else start_dtype(assets)
    held = read_folder(folder)
    tensors = {name: cast(tensor, _CODES[dtype]) for name, tensor in held.items()}
    if wanted.own_head and HEAD not in tensors:
        tensors[HEAD] = tensors[EMBED]
        config["tie_word_embeddings"] = False
    written = folder / "published.tmp"
    write_tensors(written, tensors)
    manifest = write_manifest(folder, wanted.version, sums_of(tensors))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    written.rename(folder / "model.safetensors")
    config |= {"torch_dtype": dtype, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return manifest


def cast(tensor: StoredTensor, dtype: str) -> StoredTensor:
    """Return the tensor in another dtype; float32 -> bfloat16 rounds to nearest, ties to even."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype == "F32" and dtype == "BF16":
        bits = tensor.data.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        halves = rounded.astype(np.uint16)
        # rounding up could turn a NaN into an infinity
        halves[np.isnan(tensor.data.view(np.float32))] = 0x7FC0
        return StoredTensor(dtype=dtype, shape=tensor.shape, data=halves.view(np.uint8))
    if tensor.dtype == "BF16" and dtype == "F32":
        wide = tensor.data.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return StoredTensor(dtype=dtype, shape=tensor.shape, data=wide.view(np.uint8))
    raise TrainError(f"weights of type {tensor.dtype} cannot be published as {dtype}")
