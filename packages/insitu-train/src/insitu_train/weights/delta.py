"""The difference of two versions of the same weights: changed places and their new values.

A small step changes few bfloat16 values, so most bytes need not be sent. A delta names the version and
checksum of its base and the checksum of every resulting tensor: with another base, or one wrong bit, nothing
is written.

File: safetensors; per changed tensor `NAME#gaps` (uint8 steps from one listed place to the next; longer gaps
pass through places whose value stays) and `NAME#values`, or `NAME#whole`. The metadata entry `delta` holds
the rest.
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
from insitu.storage.files import replaced_folder

GAPS, VALUES, WHOLE = "#gaps", "#values", "#whole"
_STEP = 255
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """The header of a delta."""

    base: int
    base_checksum: str
    target: Manifest


def _units(tensor: StoredTensor) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    return tensor.data.view(_UNITS[WIDTHS[tensor.dtype]])


def difference(
    old: StoredTensor, new: StoredTensor
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None:
    """Return (gaps, values as bytes), or None where the whole tensor is no larger."""
    before, now = _units(old), _units(new)
    places = np.flatnonzero(before != now)
    steps = np.diff(places, prepend=-1)
    extra = (steps - 1) // _STEP
    if (len(places) + int(extra.sum())) * (1 + now.itemsize) >= len(new.data):
        return None
    # long gaps are bridged by a listed place every _STEP steps, whose value stays
    gaps = np.full(len(places) + int(extra.sum()), _STEP, np.uint8)
    gaps[np.cumsum(extra + 1) - 1] = steps - extra * _STEP
    listed = np.cumsum(gaps.astype(np.int64)) - 1
    return gaps, now[listed].view(np.uint8)


def write_delta(path: Path, old: Path, new: Path) -> int:
    """Write the difference of two published folders; return its bytes. Raises EngineError."""
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
    header = {
        "base": base.version,
        "base_checksum": base.checksum,
        "version": target.version,
        "checksum": target.checksum,
        "tensors": dict(target.tensors),
    }
    fresh = path.with_name(f".{path.name}.new")
    with boundary(EngineError, f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        size = write_tensors(fresh, parts, {"delta": orjson.dumps(header).decode()})
        fresh.rename(path)
    return size


def read_delta(path: Path) -> _Delta:
    """Read the header. Raises EngineError for other files."""
    try:
        raw = orjson.loads(read_notes(path)["delta"])
        target = Manifest(version=raw["version"], checksum=raw["checksum"], tensors=raw["tensors"])
        return _Delta(base=raw["base"], base_checksum=raw["base_checksum"], target=target)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{path} is not a delta of weights: {error!r}") from error


def apply_delta(path: Path, base: Path, folder: Path) -> Manifest:
    """Create `folder` atomically from the published folder `base`, with verified checksums.

    Raises EngineError when `base` is not the version and checksum that the delta was made from.
    """
    delta, found = read_delta(path), _manifest(base)
    if (found.version, found.checksum) != (delta.base, delta.base_checksum):
        raise EngineError(
            f"{path} needs version {delta.base} ({delta.base_checksum[:12]}), {base} holds version"
            f" {found.version} ({found.checksum[:12]})"
        )
    tensors = _patched(read_folder(base), read_tensors(path), delta.target)
    check_manifest(path, delta.target, sums_of(tensors))
    with boundary(EngineError, f"write weights into {folder}"), replaced_folder(folder) as fresh:
        write_tensors(fresh / "model.safetensors", tensors)
        for other in base.iterdir():
            if other.is_file() and ".safetensors" not in other.suffixes:
                shutil.copyfile(other, fresh / other.name)
        return write_manifest(fresh, delta.target.version, delta.target.tensors)


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
        raise EngineError(f"{folder} is not a published folder: it has no checksums")
    return found
