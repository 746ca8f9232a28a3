"""Checkpoints: model, optimizer, counters and random state in one folder, written atomically.

Everything is written to a temporary folder, hashed on the way, fsynced with a checksum file, then renamed.
The folder loads as a model (config.json, model.safetensors, tokenizer files) or as adapters; with its
sub-folder `trainer` it continues training, on a CPU with the same bits. The sub-folder exists because an
engine loads every safetensors file beside a model. Random state is torch's, of the CPU and the model's GPU;
nothing else draws from global state: sampler streams are keyed by seed and request, adapters start from a
fixed generator, numpy's and Python's global generators are unused.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from insitu import failpoint
from insitu.engines.safetensors_file import model_assets
from insitu.errors import TrainError
from insitu.storage.files import sha256_of
from insitu_train.checkpoint_files import MOMENTS, STATE, SUMS, verify
from insitu_train.embedded.model_files import StoredModel, copied, model_files, share, write_hashed
from insitu_train.host_memory import available_memory
from insitu_train.model.base import Policy
from insitu_train.model.shard import like
from insitu_train.trainer.distributed import Together
from insitu_train.trainer.trainer import Trainer

SCHEMA = 2
"""2: the trainer's state is in the sub-folder `trainer`; 1: beside the model's files."""
RNG, RNG_GPU = "rng", "rng_cuda"
"""Names of the random states among the optimizer's tensors."""
_SHARE = 0.8
"""Part of the free host memory that the copy of a checkpoint may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The content of a checkpoint, not written yet."""

    model: StoredModel
    moments: Mapping[str, Tensor]
    """Optimizer and random state."""
    described: str
    """Content of state.json."""
    assets: Path | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for part in (self.model.tensors, self.moments) for t in part.values())

    def copied(self) -> Snapshot:
        """Return it with tensors of its own in host memory, which no later step changes."""
        return replace(self, model=self.model.copied(), moments=copied(self.moments))

    def write(self, folder: Path) -> None:
        """Write it at `folder`, replacing an existing checkpoint. Raises TrainError.

        After a crash `folder` is the old checkpoint, absent, or the new one.
        """
        fresh = folder.with_name(f".{folder.name}.new")
        old = folder.with_name(f".{folder.name}.old")
        with model_files(TrainError, f"save checkpoint {folder}"):
            for left in (fresh, old):
                shutil.rmtree(left, ignore_errors=True)
            fresh.mkdir(parents=True)
            self._write_files(fresh)
            share(fresh)
            for path in sorted(fresh.rglob("*")):
                _sync(path)
            _sync(fresh)
            failpoint.hit("checkpoint.written")
            if folder.exists():
                folder.rename(old)
            failpoint.hit("checkpoint.between")
            fresh.rename(folder)
            failpoint.hit("checkpoint.renamed")
            _sync(folder.parent)
            shutil.rmtree(old, ignore_errors=True)

    def _write_files(self, folder: Path) -> None:
        if self.assets is not None:
            for path in model_assets(self.assets):
                shutil.copyfile(path, folder / path.name)
        sums = {self.model.name: self.model.write(folder)}
        (folder / MOMENTS).parent.mkdir()
        sums[MOMENTS] = write_hashed(folder / MOMENTS, self.moments)
        (folder / STATE).write_text(self.described, encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if name not in sums:
                sums[name] = sha256_of(path)
        (folder / SUMS).write_text(json.dumps(sums, indent=2, sort_keys=True) + "\n")


def snapshot(trainer: Trainer, assets: Path | None = None) -> Snapshot:
    """Return the trainer's state, not copied.

    assets: a model folder whose other files (tokenizer, chat template) are copied. One of several sharded
    ranks calls it, inside `Trainer.whole(moments=True)`.
    """
    described = {
        "schema_version": SCHEMA,
        "step": trainer.steps,
        "version": trainer.version,
        "optim": trainer.config.optim.model_dump(mode="json"),
        "reference": reference_of(trainer),
    }
    return Snapshot(
        model=trainer.model.stored(),
        moments={**trainer.optimiser.readable(), **_random(trainer.model.device)},
        described=json.dumps(described, indent=2, sort_keys=True) + "\n",
        assets=assets,
    )


def save(trainer: Trainer, folder: Path, assets: Path | None = None) -> None:
    """Write a checkpoint at `folder` in the foreground. Raises TrainError."""
    snapshot(trainer, assets).write(folder)


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None

    def begin(self, made: Snapshot, folder: Path, *, owned: bool) -> None:
        """Begin to write; `wait` first.

        owned: no later step changes the tensors, so that they are not copied. Without host memory for a copy
        it is written before this returns.
        """
        if not owned and made.nbytes > _SHARE * available_memory():
            print(f"checkpoint {folder}: no memory for a copy, written in the foreground", file=sys.stderr)
            self._write(made, folder)
            return
        held = made if owned else made.copied()
        self._thread = threading.Thread(target=self._write, args=(held, folder))
        self._thread.start()

    def _write(self, made: Snapshot, folder: Path) -> None:
        try:
            made.write(folder)
        except Exception as error:  # noqa: BLE001 - raised or returned by `wait`
            self._failed = error

    def wait(self) -> str:
        """Wait for the end; return why the checkpoint was not written, or empty."""
        if self._thread is not None:
            self._thread.join()
        failed, self._thread, self._failed = self._failed, None, None
        if failed is not None and not isinstance(failed, TrainError):
            raise failed
        return str(failed or "")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A checkpoint as it was read."""

    raw: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    moments: dict[str, Tensor]


def load(trainer: Trainer, folder: Path) -> None:
    """Restore the trainer from a checkpoint. Raises TrainError, changing nothing, when it does not fit."""
    _restore(trainer, _read(trainer, folder))


def load_shared(trainer: Trainer, folder: Path | None) -> None:
    """Restore all ranks from a checkpoint that only the first reads, as `load`; the others give None."""
    ranks = trainer.ranks
    found = ranks.attempt(lambda: None if folder is None else _read(trainer, folder))
    _restore(trainer, _from_first(ranks, found) if isinstance(ranks, Together) else found)


def _read(trainer: Trainer, folder: Path) -> _Loaded:
    verify(folder)
    with model_files(TrainError, f"load checkpoint {folder}"):
        raw = json.loads((folder / STATE).read_text())
        moments = load_file(folder / MOMENTS)
    if raw["schema_version"] != SCHEMA:
        raise TrainError(
            f"checkpoint {folder} has schema {raw['schema_version']}, this version of insitu reads schema"
            f" {SCHEMA} only"
        )
    if raw["optim"] != trainer.config.optim.model_dump(mode="json"):
        raise TrainError(f"checkpoint {folder} was made with different optimizer settings: {raw['optim']}")
    if raw["reference"] != reference_of(trainer):
        raise TrainError(f"checkpoint {folder} was made with a different reference policy (train.reference)")
    return _Loaded(raw, trainer.model.read(folder), moments)


def _restore(trainer: Trainer, found: _Loaded | None) -> None:
    if found is None:
        raise TrainError("a single rank has no checkpoint to load")
    moments = found.moments
    random = {name: moments.pop(name) for name in (RNG, RNG_GPU) if name in moments}
    trainer.optimiser.restore(moments)
    _copy(found.weights, trainer.model)
    trainer.steps, trainer.version = int(found.raw["step"]), int(found.raw["version"])
    _restore_random(random, trainer.model.device)


def _from_first(ranks: Together, found: _Loaded | None) -> _Loaded:
    """Return what the first rank read, one tensor after another."""
    held = {} if found is None else {**_tagged("w", found.weights), **_tagged("m", found.moments)}
    shapes = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in held.items()]
    text = json.dumps([{} if found is None else dict(found.raw), shapes]).encode()
    size = int(ranks.broadcast(torch.tensor([len(text)])))
    sent = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if found
        else torch.empty(size, dtype=torch.uint8)
    )
    raw, shapes = json.loads(bytes(ranks.broadcast(sent).tolist()))
    parts: dict[str, dict[str, Tensor]] = {"w": {}, "m": {}}
    for name, dtype, shape in shapes:
        own = held[name].detach() if found else torch.empty(shape, dtype=getattr(torch, dtype))
        parts[name[0]][name[2:]] = ranks.broadcast(own)
    return _Loaded(raw, parts["w"], parts["m"])


def _tagged(tag: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{tag} {name}": tensor for name, tensor in tensors.items()}


def _random(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the generators that training draws from, as bytes."""
    state = {RNG: torch.get_rng_state()}
    if device.type == "cuda":
        state[RNG_GPU] = torch.cuda.get_rng_state(device)
    return state


def _restore_random(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state of `_random`; a checkpoint from a CPU has no GPU state."""
    torch.set_rng_state(state[RNG])
    if device.type == "cuda" and RNG_GPU in state:
        torch.cuda.set_rng_state(state[RNG_GPU], device)


def reference_of(trainer: Trainer) -> str:
    """Return the checksum of the reference policy, or empty without one."""
    return trainer.reference.checksum if trainer.reference is not None else ""


def _copy(held: Mapping[str, Tensor], target: Policy) -> None:
    named = dict(target.named_parameters())
    with torch.no_grad():
        for name, tensor in held.items():
            named[name].copy_(like(tensor, named[name]))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
