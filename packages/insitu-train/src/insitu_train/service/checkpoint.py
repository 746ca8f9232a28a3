"""Checkpoints of a run at a training service: a folder that names the weights, which stay there."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from insitu.engines.safetensors_file import model_assets
from insitu.errors import TrainError, boundary
from insitu.storage.files import replaced_folder, write_text
from insitu.types.codec import read
from insitu_train.checkpoint_files import SERVICE as FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCheckpoint:
    """The contents of `service.json`."""

    url: str
    """Address of the service; empty = the SDK's default."""
    model: str
    state: str
    """Path of weights and optimizer at the service."""
    steps: int
    version: int
    weights: str
    """Label of the weights."""


def write_checkpoint(folder: Path, checkpoint: ServiceCheckpoint, assets: Path) -> None:
    """Write `folder` atomically, with the tokenizer files of `assets`. Raises TrainError."""
    with boundary(TrainError, f"save checkpoint {folder}"), replaced_folder(folder) as fresh:
        for path in model_assets(assets):
            shutil.copyfile(path, fresh / path.name)
        write_text(fresh / FILE, json.dumps(asdict(checkpoint), indent=2))


def read_checkpoint(folder: Path) -> ServiceCheckpoint:
    """Raise TrainError when the folder is not a checkpoint of a service."""
    with boundary(TrainError, f"load checkpoint {folder}"):
        raw = json.loads((folder / FILE).read_text())
        checkpoint: ServiceCheckpoint = read(ServiceCheckpoint, raw)
        return checkpoint
