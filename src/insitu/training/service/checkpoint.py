"""Checkpoints of a run at a training service: a folder that names the weights, which stay there."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from insitu.engines.safetensors_file import model_assets
from insitu.errors import TrainError, boundary

FILE = "service.json"


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
    fresh = folder.with_name(f".{folder.name}.new")
    with boundary(TrainError, f"save checkpoint {folder}"):
        for old in (fresh, folder):
            shutil.rmtree(old, ignore_errors=True)
        fresh.mkdir(parents=True)
        for path in model_assets(assets):
            shutil.copyfile(path, fresh / path.name)
        with (fresh / FILE).open("w") as file:
            json.dump(asdict(checkpoint), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(folder)


def read_checkpoint(folder: Path) -> ServiceCheckpoint:
    """Raise TrainError when the folder is not a checkpoint of a service."""
    with boundary(TrainError, f"load checkpoint {folder}"):
        try:
            return ServiceCheckpoint(**json.loads((folder / FILE).read_text()))
        except TypeError as error:
            raise TrainError(f"load checkpoint {folder}: {FILE}: {error}") from error
