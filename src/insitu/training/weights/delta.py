"""Two versions of the same weights as their difference: the places that changed and what stands there now.

A small step moves few bfloat16 values by a whole unit in the last place, so most bytes need not travel. A
delta names the version and checksum it starts from and the checksum of every tensor it leads to: on any other
base, or with one bit wrong, nothing is written. No torch: applied in the controller or beside an engine.

File: safetensors; per changed tensor `NAME#gaps` (uint8 steps from one listed place to the next; longer gaps
are bridged by places whose value stays) and `NAME#values`, or `NAME#whole`. The note `delta` says the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from insitu.engines.safetensors_file import (
    WIDTHS,
    Manifest,
    StoredTensor,
    check_manifest,
    read_folder,
    read_manifest,
    read_notes,
    read_tensors,
    sums_of,
    write_manifest,
    write_tensors,
)
from insitu.errors import EngineError, boundary

GAPS, VALUES, WHOLE = "#gaps", "#values", "#whole"
_STEP = 255
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What the header of a delta says."""

    base: int
    base_checksum: str
    target: Manifest


def _units(tensor: StoredTensor) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    return tensor.data.view(_UNITS[WIDTHS[tensor.dtype]])


def difference(
    old: StoredTensor, new: StoredTensor
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None:
    """(gaps, values as bytes); None where the whole tensor is no larger. Both have one type and shape."""
    before, now = _units(old), _units(new)
    places = np.flatnonzero(before != now)
    steps = np.diff(places, prepend=-1)
    extra = (steps - 1) // _STEP
    if (len(places) + int(extra.sum())) * (1 + now.itemsize) >= len(new.data):
        return None
    # A listed place every _STEP steps bridges long gaps; what stands there stays.
    gaps = np.full(len(places) + int(extra.sum()), _STEP, np.uint8)
    gaps[np.cumsum(extra + 1) - 1] = steps - extra * _STEP
    listed = np.cumsum(gaps.astype(np.int64)) - 1
    return gaps, now[listed].view(np.uint8)


def write_delta(path: Path, old: Path, new: Path) -> int:
    """The difference between two published folders as a file; its bytes. Raises EngineError."""
    base, target = _manifest(old), _manifest(new)
    before, now = read_folder(old), read_folder(new)
    parts: dict[str, StoredTensor] = {}
    for name, tensor in now.items():
        held = before.get(name)
        if held is not None and base.tensors[name] == target.tensors[name]:
            continue
        same = held is not None and (held.dtype, held.shape) == (tensor.dtype, tensor.shape)
        found = difference(held, tensor) if same and held is not None else None
        if found is None:
            parts[name + WHOLE] = tensor
        else:
            gaps, values = found
            parts[name + GAPS] = StoredTensor(dtype="U8", shape=(len(gaps),), data=gaps)
            parts[name + VALUES] = StoredTensor(dtype="U8", shape=(len(values),), data=values)
    told = {
        "base": base.version,
        "base_checksum": base.checksum,
        "version": target.version,
        "checksum": target.checksum,
        "tensors": dict(target.tensors),
    }
    fresh = path.with_name(f".{path.name}.new")
    with boundary(EngineError, f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        size = write_tensors(fresh, parts, {"delta": orjson.dumps(told).decode()})
        fresh.rename(path)
    return size


def read_delta(path: Path) -> Delta:
    """Raises EngineError for a file that is none."""
    try:
        raw = orjson.loads(read_notes(path)["delta"])
        target = Manifest(version=raw["version"], checksum=raw["checksum"], tensors=raw["tensors"])
        return Delta(base=raw["base"], base_checksum=raw["base_checksum"], target=target)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{path} is not a delta of weights: {error!r}") from error


def apply_delta(path: Path, base: Path, folder: Path) -> Manifest:
    """Make `folder` from the published folder `base`; it appears whole and proven, or not at all.

    Raises EngineError when `base` is not the version and checksum that the delta was made from.
    """
    told, held = read_delta(path), _manifest(base)
    if (held.version, held.checksum) != (told.base, told.base_checksum):
        raise EngineError(
            f"{path} is for version {told.base} ({told.base_checksum[:12]}), {base} holds version"
            f" {held.version} ({held.checksum[:12]})"
        )
    tensors = _patched(read_folder(base), read_tensors(path), told.target)
    check_manifest(path, told.target, sums_of(tensors))
    fresh = folder.with_name(f".{folder.name}.new")
    with boundary(EngineError, f"write weights into {folder}"):
        for left in (fresh, folder):
            shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir(parents=True)
        write_tensors(fresh / "model.safetensors", tensors)
        for other in base.iterdir():
            if other.is_file() and not other.name.endswith(".safetensors"):
                shutil.copyfile(other, fresh / other.name)
        manifest = write_manifest(fresh, told.target.version, told.target.tensors)
        fresh.rename(folder)
    return manifest


def _patched(
    base: Mapping[str, StoredTensor], parts: Mapping[str, StoredTensor], target: Manifest
) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name in target.tensors:
        if name + WHOLE in parts:
            found[name] = parts[name + WHOLE]
        elif name + GAPS in parts and name in base:
            found[name] = _moved(name, base[name], parts)
        elif name in base:
            found[name] = base[name]
    return found


def _moved(name: str, base: StoredTensor, parts: Mapping[str, StoredTensor]) -> StoredTensor:
    units = _units(base).copy()
    places = np.cumsum(parts[name + GAPS].data.astype(np.int64)) - 1
    values = parts[name + VALUES].data.view(units.dtype) if name + VALUES in parts else units[:0]
    if len(values) != len(places) or (len(places) and places[-1] >= len(units)):
        raise EngineError(f"the delta's places of {name} do not fit the tensor")
    units[places] = values
    return StoredTensor(dtype=base.dtype, shape=base.shape, data=units.view(np.uint8))


def _manifest(folder: Path) -> Manifest:
    found = read_manifest(folder)
    if found is None:
        raise EngineError(f"{folder} was not published: it has no checksums")
    return found
