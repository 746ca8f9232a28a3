"""What all of TRL's bridges share: the rollout source, and weights of the trainer for its engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.config import Config, model_folder
from insitu.engines.safetensors_file import (
    StoredTensor,
    model_assets,
    sums_of,
    write_manifest,
    write_tensors,
)
from insitu.errors import ConfigError, TrainError, boundary
from insitu_bridges.process import read, weights_folder
from insitu_bridges.thread import SourceThread
from insitu_bridges.versions import Need, check
from insitu_train.plan.step import PlanConfig

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
"""Names in files of the types of weights."""
KEPT = 2
"""Folders of weights that are kept."""


class SourceOwner:
    """Base of the objects that TRL calls: a configuration and its rollout source."""

    needs: tuple[Need, ...] = ()
    """What the object uses of TRL, or TRL of it."""

    def __init__(self, config: Config | Path | str) -> None:
        """Read the configuration. Raises ConfigError, also for a TRL that lacks what is used."""
        check("trl", *self.needs)
        self.config = read(config)
        self._plan = PlanConfig.of(self.config)

    @cached_property
    def source(self) -> SourceThread:
        """The rollout source, opened at the first use."""
        return SourceThread(self.config)

    def close(self) -> None:
        """End agents, sandboxes and the child process."""
        if "source" in self.__dict__:
            self.source.close()


def check_temperature(config: Config, args: Any) -> None:
    """Raise ConfigError where trainer and engine sample with different temperatures."""
    if args.temperature != config.engine.temperature:
        raise ConfigError(
            f"temperature {args.temperature} of the trainer is not engine.temperature"
            f" {config.engine.temperature}: log-probabilities of both must be of one distribution"
        )


def write_weights(folder: Path, model: Path, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a model folder: named tensors, and configuration and tokenizer of the start model."""
    with boundary(TrainError, f"write {folder}"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in [model / "config.json", *model_assets(model)]:
            shutil.copyfile(path, folder / path.name)
        for old in sorted(folder.parent.glob("v*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    stored = {name: _stored(tensor) for name, tensor in tensors}
    write_tensors(folder / "model.safetensors", stored)
    write_manifest(folder, version, sums_of(stored))


def _stored(tensor: Tensor) -> StoredTensor:
    """Return the bytes of a tensor, without importing torch."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(flat.new_empty(0).byte().dtype).numpy().copy()
    return StoredTensor(dtype=DTYPES[str(tensor.dtype)], shape=tuple(tensor.shape), data=data)


def publish(
    source: SourceThread, config: Config, version: int, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Bring weights into the engine under a version."""
    folder = weights_folder(source.source.run_dir, version)
    write_weights(folder, model_folder(config), version, tensors)
    source.call(lambda child: child.load(version))
