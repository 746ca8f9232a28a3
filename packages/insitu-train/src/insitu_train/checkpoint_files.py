"""Files of a checkpoint, checked without the learner."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from insitu.errors import TrainError, boundary
from insitu.storage.files import sha256_of
from insitu_train.part_files import parts_in

SUMS = "checksums.json"
MODEL = "model.safetensors"
MOMENTS, STATE = "trainer/optimizer.safetensors", "trainer/state.json"
SERVICE = "service.json"
"""Instead of the model, the state's name at a training service."""


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raise TrainError unless every file of the checkpoint has its checksum.

    parts: readers that check a share of the files each; this one is number `part`, from 0.
    """
    with boundary(TrainError, f"load checkpoint {folder}"):
        sums = json.loads((folder / SUMS).read_text())
        if not isinstance(sums, dict):
            raise TrainError(f"checkpoint {folder} is damaged: {SUMS} holds no names")
        for name, expected in sorted(sums.items())[part::parts]:
            if sha256_of(folder / name) != expected:
                raise TrainError(f"checkpoint {folder} is damaged: {name} has a wrong checksum")
    whole, adapters = (
        {"config.json", MODEL},
        {"adapter_config.json", "adapter_model.safetensors"},
    )
    weights = adapters if adapters & set(sums) else whole
    needed = {file for name in (*weights, MOMENTS, STATE) for file in parts_in(name, sums)}
    missing = sorted(needed - set(sums))
    if missing:
        raise TrainError(f"checkpoint {folder} is incomplete: no checksum for {missing[0]}")


def set_aside(folder: Path) -> str:
    """Rename a checkpoint whose files are damaged, so that the one before it counts; return what happened.

    Empty, changing nothing, when its files are whole or it is one of a training service. Raises TrainError.
    """
    if (folder / SERVICE).exists():
        return ""
    try:
        verify(folder)
    except TrainError as error:
        aside = folder.with_name(f"damaged-{folder.name}")
        with boundary(TrainError, f"{error}; move it away"):
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        return f"{error}; it is now {aside.name}, and steps are trained again from the checkpoint before it"
    return ""
