"""Files that several ranks write together, each its own: names, notes about them, their index. No torch.

model-00001-of-00002.safetensors   by rank 0      .part-0.json   what it wrote, gone when all are there
model-00002-of-00002.safetensors   by rank 1      .part-1.json
model.safetensors.index.json       which of them has a tensor, as transformers reads it
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from insitu.errors import TrainError
from insitu.types.keys import Keys

INDEX = ".index.json"
_POLL_S = 0.05


class PartNote(Keys):
    """What one rank wrote."""

    sums: Mapping[str, str] = {}
    """SHA-256 of each file, or of each tensor, by name."""
    tensors: Mapping[str, Mapping[str, int]] = {}
    """Of each file: bytes of each tensor."""
    error: str = ""
    """Why it wrote nothing."""


def part_name(name: str, part: int, parts: int) -> str:
    """Return the name of a file's part, numbered from 0; the file's own name if it has one part only."""
    stem, _, end = name.rpartition(".")
    return name if parts == 1 else f"{stem}-{part + 1:05d}-of-{parts:05d}.{end}"


def parts_in(name: str, among: Collection[str]) -> list[str]:
    """Return the names of a file's parts that must be `among` these for it to be complete.

    They are those that the first one there asks for; `name` itself if there is none.
    """
    stem, _, end = name.rpartition(".")
    pattern = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-(\d{{5}})\.{re.escape(end)}")
    found = next(filter(None, map(pattern.fullmatch, sorted(among))), None)
    if name in among or found is None:
        return [name]
    count = int(found[1])
    return [part_name(name, part, count) for part in range(count)] + [name + INDEX]


def leave_note(folder: Path, part: int, note: PartNote) -> None:
    """Say what a rank wrote into a folder, at once. Raises OSError."""
    fresh = folder / f".part-{part}.new"
    fresh.write_text(note.model_dump_json(), encoding="utf-8")
    fresh.rename(folder / f".part-{part}.json")


def take_notes(
    folder: Path, parts: int, *, wait_s: float = 0.0, dead: Callable[[], str] = lambda: ""
) -> list[PartNote]:
    """Return and remove the notes of all ranks, waiting for them.

    dead: says which rank has died. Raises TrainError for one that died, failed or did not write in time.
    """
    until, found = time.monotonic() + wait_s, list[PartNote]()
    for part in range(parts):
        path = folder / f".part-{part}.json"
        while not path.exists():
            if (line := dead()) and not path.exists():
                raise TrainError(f"{line} before it wrote its part")
            if time.monotonic() > until:
                raise TrainError(f"rank {part} has not written its part within {wait_s:g} s")
            time.sleep(_POLL_S)
        note = PartNote.model_validate_json(path.read_bytes())
        if note.error:
            raise TrainError(f"rank {part}: {note.error}")
        path.unlink()
        found.append(note)
    return found


def write_index(path: Path, notes: Sequence[PartNote]) -> Path:
    """Write the index of a file's parts beside them, as they are noted; return it. Raises OSError."""
    stem, places, size = path.name.partition(".")[0], dict[str, str](), 0
    for note in notes:
        for file, tensors in note.tensors.items():
            name = file.rpartition("/")[2]
            if name.startswith(f"{stem}-"):
                places |= dict.fromkeys(tensors, name)
                size += sum(tensors.values())
    index = path.with_name(path.name + INDEX)
    body = {"metadata": {"total_size": size}, "weight_map": places}
    index.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return index
