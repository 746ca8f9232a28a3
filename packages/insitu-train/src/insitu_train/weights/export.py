"""Writes the trainer's weights as a model folder for an engine, in the learner's process.

Tensors are cast to the engine's type where they are and written one by one. The folder appears atomically,
with `weights.json`: its version and the checksum of every tensor, which later verification uses. Sharded
ranks write a file each (part_files.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from insitu.engines.safetensors_file import Manifest, model_assets, write_manifest
from insitu.errors import TrainError
from insitu.storage.files import replaced_folder
from insitu_train.embedded.model_files import model_files, share, write_summed
from insitu_train.model.base import Policy
from insitu_train.model.load import start_dtype
from insitu_train.model.lora import CONFIG as ADAPTER
from insitu_train.part_files import PartNote, leave_note, part_name, take_notes, write_index
from insitu_train.weights.files import ExportRequest

T = TypeVar("T")
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_NOTHING = Manifest(version=0, checksum="", tensors={})


class WritesTogether(Protocol):
    """Ranks that write together (trainer/distributed.py)."""

    rank: int

    def attempt(self, work: Callable[[], T]) -> T:
        """Run `work`, or raise the TrainError of the first failed rank on all."""


class _Alone:
    rank = 0

    def attempt(self, work: Callable[[], T]) -> T:
        return work()


def export(
    policy: Policy, wanted: ExportRequest, assets: Path, ranks: WritesTogether | None = None, parts: int = 1
) -> Manifest:
    """Write `wanted.folder`, replacing an existing one; sharded ranks call it inside `Trainer.whole`.

    assets: folder of the start model. parts: files that the first ranks write, one each; only the first rank
    returns the manifest. Raises TrainError, also for adapters of a policy without any.
    """
    ranks, folder = ranks or _Alone(), wanted.folder
    with ExitStack() as stack:

        def on(some: bool, work: Callable[[], T], other: T) -> T:
            """Run a part of the work on some ranks; all wait, and an error is everyone's."""

            def tried() -> T:
                with model_files(TrainError, f"publish weights into {folder}"):
                    return work() if some else other

            return ranks.attempt(tried)

        first = ranks.rank == 0
        on(first, lambda: stack.enter_context(replaced_folder(folder)), folder)
        fresh = folder.with_name(f".{folder.name}.new")
        on(ranks.rank < parts, lambda: _write(policy, fresh, wanted, assets, ranks.rank, parts), None)
        return on(first, lambda: _finish(fresh, wanted, assets, parts), _NOTHING)


def _finish(folder: Path, wanted: ExportRequest, assets: Path, parts: int) -> Manifest:
    """Make one folder of what the ranks wrote."""
    notes = take_notes(folder, parts)
    if parts > 1:
        write_index(folder / "model.safetensors", notes)
    sums = {name: found for note in notes for name, found in note.sums.items()}
    manifest = write_manifest(folder, wanted.version, sums)
    if not wanted.adapter:  # an engine might use a tokenizer beside adapters
        for path in model_assets(assets):
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    share(folder)
    return manifest


def _write(policy: Policy, folder: Path, wanted: ExportRequest, assets: Path, part: int, parts: int) -> None:
    """Write a rank's tensors, the first one's with the configuration, and note the checksum of each."""
    stored = policy.stored(whole=not wanted.adapter)
    tensors, texts, dtype = dict(stored.tensors), dict(stored.texts), wanted.dtype
    if wanted.adapter and ADAPTER not in texts:
        raise TrainError("the policy has no adapters to publish: policy.lora_rank is 0")
    if not wanted.adapter:
        dtype = start_dtype(assets) if dtype == "auto" else dtype
        config = json.loads(texts["config.json"])
        if wanted.own_head and HEAD not in {*tensors, *(name for name, _ in policy.named_parameters())}:
            # the rank that has the embeddings writes them twice
            for held in [t for n, t in tensors.items() if n.replace("language_model.", "") == EMBED]:
                tensors[HEAD] = held
            config["tie_word_embeddings"] = False
        config |= {"torch_dtype": dtype, "dtype": dtype}
        texts["config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    for name, text in texts.items() if not part else ():
        (folder / name).write_text(text, encoding="utf-8")
    kind = None if dtype == "auto" else getattr(torch, dtype)
    file = part_name(stored.name, part, parts)
    sums = write_summed(folder / file, tensors, kind)
    sizes = {
        name: t.numel() * (kind if kind and t.is_floating_point() else t.dtype).itemsize
        for name, t in tensors.items()
    }
    leave_note(folder, part, PartNote(sums=sums, tensors={file: sizes}))
