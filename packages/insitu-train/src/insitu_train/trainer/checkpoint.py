"""Checkpoints: model, optimizer, counters and random state in one folder, written atomically.

Everything is written to a temporary folder, hashed on the way, fsynced with a checksum file, then renamed.
The folder loads as a model (config.json, model.safetensors, tokenizer files) or as adapters; with its
sub-folder `trainer` it continues training, on a CPU with the same bits. The sub-folder exists because an
engine loads every safetensors file beside a model. Sharded ranks write a file each (part_files.py); tensors
in it are whole, so that any number of ranks goes on. Random state is torch's, of the CPU and the model's GPU;
nothing else draws from global state: sampler streams are keyed by seed and request, adapters start from a
fixed generator, numpy's and Python's global generators are unused.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from insitu import failpoint
from insitu.engines.safetensors_file import model_assets
from insitu.errors import TrainError
from insitu.storage.files import sha256_of
from insitu_train.checkpoint_files import MOMENTS, STATE, SUMS, verify
from insitu_train.embedded.model_files import StoredModel, copied, model_files, share, write_hashed
from insitu_train.host_memory import available_memory
from insitu_train.model.hf import HfPolicy
from insitu_train.model.parts import PartFiles
from insitu_train.model.shard import part_of, put, stored_parameters
from insitu_train.part_files import PartNote, leave_note, part_name, take_notes, write_index
from insitu_train.trainer.distributed import Together
from insitu_train.trainer.sent import SentTensors, described, take_over
from insitu_train.trainer.trainer import Trainer

SCHEMA = 2
"""2: the trainer's state is in the sub-folder `trainer`; 1: beside the model's files."""
RNG, RNG_GPU = "rng", "rng_cuda"
"""Names of the random states among the optimizer's tensors."""
_SHARE = 0.8
"""Part of the free host memory that the copy of a checkpoint may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The content of a checkpoint, or of this rank's part, not written yet."""

    model: StoredModel
    moments: Mapping[str, Tensor]
    """Optimizer and random state."""
    described: str
    """Content of state.json."""
    assets: Path | None
    part: int = 0
    parts: int = 1

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for part in (self.model.tensors, self.moments) for t in part.values())

    def copied(self) -> Snapshot:
        """Return it with tensors of its own in host memory, which no later step changes."""
        return replace(self, model=self.model.copied(), moments=copied(self.moments))

    def write(self, folder: Path, *, wait_s: float = 0.0, dead: Callable[[], str] = lambda: "") -> None:
        """Write it at `folder`, replacing an existing checkpoint; of several parts after `prepare`.

        The first part waits for the others and makes the checkpoint of them. Raises TrainError.
        After a crash `folder` is the old checkpoint, absent, or the new one.
        """
        fresh = folder.with_name(f".{folder.name}.new")
        old = folder.with_name(f".{folder.name}.old")
        with model_files(TrainError, f"save checkpoint {folder}"):
            if self.parts == 1:
                prepare(folder)
                sums = self._write_files(fresh)
            else:
                leave_note(fresh, self.part, self._write_part(fresh))
                if self.part:
                    return
                sums = self._join_parts(fresh, take_notes(fresh, self.parts, wait_s=wait_s, dead=dead))
            self._write_rest(fresh, sums)
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

    def _write_files(self, folder: Path) -> dict[str, str]:
        """Write the tensors into one file each; return its SHA-256 by name."""
        return {
            self.model.name: write_hashed(folder / self.model.name, self.model.tensors),
            MOMENTS: write_hashed(folder / MOMENTS, self.moments),
        }

    def _write_part(self, folder: Path) -> PartNote:
        """Write this rank's files; return what they are, or the error."""
        held = {self.model.name: self.model.tensors, MOMENTS: self.moments}
        mine = {part_name(name, self.part, self.parts): tensors for name, tensors in held.items()}
        try:
            with model_files(TrainError, "write its part"):
                sums = {name: write_hashed(folder / name, tensors) for name, tensors in mine.items()}
        except TrainError as error:
            return PartNote(error=str(error))
        sizes = {name: {key: t.nbytes for key, t in tensors.items()} for name, tensors in mine.items()}
        return PartNote(sums=sums, tensors=sizes)

    def _join_parts(self, folder: Path, notes: list[PartNote]) -> dict[str, str]:
        for name in (self.model.name, MOMENTS):
            write_index(folder / name, notes)
        return {name: found for note in notes for name, found in note.sums.items()}

    def _write_rest(self, folder: Path, sums: dict[str, str]) -> None:
        if self.assets is not None:
            for path in model_assets(self.assets):
                shutil.copyfile(path, folder / path.name)
        for name, text in self.model.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / STATE).write_text(self.described, encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if name not in sums:
                sums[name] = sha256_of(path)
        (folder / SUMS).write_text(json.dumps(sums, indent=2, sort_keys=True) + "\n")


def prepare(folder: Path) -> None:
    """Make the temporary folder of a checkpoint, and remove what crashes have left. Raises OSError.

    Of other steps too: a run writes one checkpoint at a time.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    for end in ("new", "old"):
        for left in (folder.with_name(f".{folder.name}.{end}"), *folder.parent.glob(f".step-[0-9]*.{end}")):
            shutil.rmtree(left, ignore_errors=True)
    (fresh / MOMENTS).parent.mkdir(parents=True)


def snapshot(trainer: Trainer, assets: Path | None = None, *, part: int = 0, parts: int = 1) -> Snapshot:
    """Return the trainer's state, not copied.

    assets: a model folder whose other files (tokenizer, chat template) are copied. Sharded ranks call it
    inside `Trainer.whole(moments=True, owners=parts)`.
    """
    state = {
        "schema_version": SCHEMA,
        "step": trainer.steps,
        "version": trainer.version,
        "optim": trainer.config.optim.model_dump(mode="json"),
        "reference": reference_of(trainer),
    }
    random = {} if part else _random(trainer.model.device)
    return Snapshot(
        model=trainer.model.stored(),
        moments={**trainer.optimiser.readable(), **random},
        described=json.dumps(state, indent=2, sort_keys=True) + "\n",
        assets=assets,
        part=part,
        parts=parts,
    )


def save(trainer: Trainer, folder: Path, assets: Path | None = None) -> None:
    """Write a checkpoint at `folder` in the foreground. Raises TrainError."""
    snapshot(trainer, assets).write(folder)


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self, wait_s: float = 0.0, dead: Callable[[], str] = lambda: "") -> None:
        """Set up. wait_s: limit of waiting for other ranks' parts; dead: says which of them has died."""
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._wait_s, self._dead = wait_s, dead

    def prepare(self, folder: Path) -> None:
        """Make the folder for the parts of several ranks; a failure is the checkpoint's."""
        try:
            with model_files(TrainError, f"save checkpoint {folder}"):
                prepare(folder)
        except TrainError as error:
            self._failed = error

    def begin(self, made: Snapshot, folder: Path, *, owned: bool) -> None:
        """Begin to write; `wait` first.

        owned: no later step changes the tensors, so that they are not copied. Without host memory for a copy
        it is written before this returns.
        """
        if self._failed is not None:
            return
        if not owned and made.nbytes > _SHARE * available_memory():
            print(f"checkpoint {folder}: no memory for a copy, written in the foreground", file=sys.stderr)
            self._write(made, folder)
            return
        held = made if owned else made.copied()
        self._thread = threading.Thread(target=self._write, args=(held, folder))
        self._thread.start()

    def _write(self, made: Snapshot, folder: Path) -> None:
        try:
            made.write(folder, wait_s=self._wait_s, dead=self._dead)
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


def begin(
    trainer: Trainer, writer: CheckpointWriter, folder: Path, assets: Path | None, owners: int = 1
) -> None:
    """Begin to write a checkpoint; `writer.wait` first. All sharded ranks call it.

    owners: sharded ranks that write a part each, the first ones, which reach `folder`. Adapters are small:
    the first rank writes them. Raises TrainError.
    """
    model, ranks = trainer.model, trainer.ranks
    adapters = isinstance(model, HfPolicy) and model.lora is not None
    parts = owners if ranks.sharded and not adapters else 1
    with trainer.whole(moments=True, owners=parts, frozen=not adapters):
        if parts > 1:
            # no rank writes before the folder is there
            ranks.attempt(lambda: None if ranks.rank else writer.prepare(folder))
        if ranks.rank < parts:
            made = snapshot(trainer, assets, part=ranks.rank, parts=parts)
            writer.begin(made, folder, owned=ranks.sharded)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A checkpoint that is open."""

    raw: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def load(trainer: Trainer, folder: Path) -> None:
    """Restore the trainer from a checkpoint; all ranks call it. Raises TrainError.

    It changes nothing when the checkpoint does not fit. A sharded rank reads its part only.
    """
    ranks = trainer.ranks
    with ExitStack() as files:
        found = ranks.attempt(lambda: files.enter_context(_opened(trainer, folder)))
        ranks.attempt(lambda: _restore(trainer, found))


def load_shared(trainer: Trainer, folder: Path | None) -> None:
    """Restore all ranks from a checkpoint that only the first reads, as `load`; the others give None."""
    ranks = trainer.ranks
    with ExitStack() as files:
        found = ranks.attempt(
            lambda: files.enter_context(_opened(trainer, folder, alone=True)) if folder else None
        )
        if isinstance(ranks, Together):
            found = _from_first(ranks, found)
        if found is None:
            raise TrainError("a single rank has no checkpoint to load")
        _restore(trainer, found)


@contextmanager
def _opened(trainer: Trainer, folder: Path, *, alone: bool = False) -> Iterator[_Loaded]:
    """Check a checkpoint and open it. alone: other ranks do not, else sharded ones check a share each."""
    ranks, model = trainer.ranks, trainer.model
    shared = ranks.sharded and not alone
    verify(folder, *((ranks.rank, ranks.world) if shared else (0, 1)))
    with model_files(TrainError, f"load checkpoint {folder}"):
        raw = json.loads((folder / STATE).read_text())
    if raw["schema_version"] != SCHEMA:
        raise TrainError(
            f"checkpoint {folder} has schema {raw['schema_version']}, this version of insitu reads schema"
            f" {SCHEMA} only"
        )
    if raw["optim"] != trainer.config.optim.model_dump(mode="json"):
        raise TrainError(f"checkpoint {folder} was made with different optimizer settings: {raw['optim']}")
    if raw["reference"] != reference_of(trainer):
        raise TrainError(f"checkpoint {folder} was made with a different reference policy (train.reference)")
    with ExitStack() as files:
        with model_files(TrainError, f"load checkpoint {folder}"):
            place = folder / MOMENTS
            moments = files.enter_context(PartFiles(place.parent, place.name))
            stored = files.enter_context(PartFiles(folder))
        if ranks.sharded and isinstance(model, HfPolicy):
            yield _Loaded(raw, stored_parameters(model, stored, folder), moments)
        else:
            yield _Loaded(raw, model.read(folder), moments)


def _restore(trainer: Trainer, found: _Loaded) -> None:
    moments = found.moments
    random = {name: moments[name] for name in (RNG, RNG_GPU) if name in moments}
    named = dict(trainer.model.named_parameters())
    state = {
        name: part_of(moments, name, named.get(name.rpartition("/")[0]))
        for name in moments
        if name not in random
    }
    trainer.optimiser.restore(state)
    for name in found.weights:
        put(named[name], found.weights, name)
    trainer.steps, trainer.version = int(found.raw["step"]), int(found.raw["version"])
    _restore_random(random, trainer.model.device)


def _from_first(ranks: Together, found: _Loaded | None) -> _Loaded:
    """Return what the first rank has opened, sent one tensor at a time when it is read."""
    own = None if found is None else [dict(found.raw), described(found.weights), described(found.moments)]
    raw, weights, moments = take_over(ranks, own)
    return _Loaded(
        raw,
        SentTensors(ranks, weights, None if found is None else found.weights),
        SentTensors(ranks, moments, None if found is None else found.moments),
    )


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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
