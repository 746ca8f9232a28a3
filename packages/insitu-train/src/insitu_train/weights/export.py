"""Writes the trainer's weights as a model folder for an engine, in the learner's process.

Tensors are cast to the engine's type where they are and written one by one. The folder appears atomically,
with `weights.json`: its version and the checksum of every tensor, which later verification uses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from insitu.engines.safetensors_file import Manifest, model_assets, write_manifest
from insitu.errors import TrainError
from insitu.storage.files import replaced_folder
from insitu_train.embedded.model_files import model_files, share, write_summed
from insitu_train.model.base import Policy
from insitu_train.model.load import start_dtype
from insitu_train.model.lora import CONFIG as ADAPTER
from insitu_train.weights.files import ExportRequest

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def export(policy: Policy, wanted: ExportRequest, assets: Path) -> Manifest:
    """Write `wanted.folder`, replacing an existing one.

    assets: folder of the start model. Raises TrainError, also for adapters of a policy without any.
    """
    folder = wanted.folder
    with model_files(TrainError, f"publish weights into {folder}"), replaced_folder(folder) as fresh:
        manifest = write_manifest(fresh, wanted.version, _write(policy, fresh, wanted, assets))
        if not wanted.adapter:  # an engine might use a tokenizer beside adapters
            for path in model_assets(assets):
                if not (fresh / path.name).exists():
                    shutil.copyfile(path, fresh / path.name)
        share(fresh)
    return manifest


def _write(policy: Policy, folder: Path, wanted: ExportRequest, assets: Path) -> dict[str, str]:
    """Write tensors and configuration; return the checksum of every tensor."""
    stored = policy.stored(whole=not wanted.adapter)
    tensors, texts, dtype = dict(stored.tensors), dict(stored.texts), wanted.dtype
    if wanted.adapter and ADAPTER not in texts:
        raise TrainError("the policy has no adapters to publish: policy.lora_rank is 0")
    if not wanted.adapter:
        dtype = start_dtype(assets) if dtype == "auto" else dtype
        config = json.loads(texts["config.json"])
        if wanted.own_head and HEAD not in tensors:
            tensors[HEAD] = next(t for n, t in tensors.items() if n.replace("language_model.", "") == EMBED)
            config["tie_word_embeddings"] = False
        config |= {"torch_dtype": dtype, "dtype": dtype}
        texts["config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return write_summed(folder / stored.name, tensors, None if dtype == "auto" else getattr(torch, dtype))
