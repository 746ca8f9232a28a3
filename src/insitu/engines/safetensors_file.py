"""Weight files (safetensors) as named runs of bytes: read through a memory map, write, digest. No torch.

Sums are SHA-256 over a tensor's bytes as an engine holds them, so they can be compared with what a server
says of its own tensors. `weights.json` beside published files names the version and every sum; a folder that
does not match its own is refused.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from insitu.errors import EngineError, boundary

Bytes = npt.NDArray[np.uint8]
WIDTHS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U16": 2, "U8": 1}
"""Bytes of one value, by the format's name of its type."""
MANIFEST = "weights.json"
SCHEMA = 1
_NOTES = "__metadata__"
_MAX_HEADER = 100 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor on disk or on its way there."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes
    """Flat, in row order; may be a view into a mapped file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of weights.json."""

    version: int
    checksum: str
    """`total` of `tensors`."""
    tensors: Mapping[str, str]
    """Sum of each tensor."""


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, loaded lazily; raise EngineError for a damaged file."""
    raw, start = _header(path)
    with boundary(EngineError, f"read weights {path}"), path.open("rb") as file:
        body = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[start:]
    try:
        return {n: _entry(path, n, e, body) for n, e in raw.items() if n != _NOTES}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(f"{path} has a damaged header: {error!r}") from error


def read_notes(path: Path) -> dict[str, str]:
    """Return the strings in a file's header; raise EngineError for a damaged file."""
    notes = _header(path)[0].get(_NOTES, {})
    return dict(notes) if isinstance(notes, dict) else {}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Its entries and where the bytes of the tensors begin."""
    with boundary(EngineError, f"read weights {path}"), path.open("rb") as file:
        size = path.stat().st_size
        head = int.from_bytes(file.read(8), "little")
        if size < 8 or head > min(size - 8, _MAX_HEADER):
            raise EngineError(f"{path} is not a complete safetensors file")
        raw = orjson.loads(file.read(head))
    if not isinstance(raw, dict):
        raise EngineError(f"{path} has a damaged header")
    return raw, 8 + head


def _entry(path: Path, name: str, entry: Mapping[str, Any], body: Bytes) -> StoredTensor:
    dtype, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in WIDTHS:
        raise EngineError(f"{path}: {name} is of type {dtype}, which is not served")
    if end - start != WIDTHS[dtype] * int(np.prod(shape, dtype=np.int64)) or not 0 <= start <= end <= len(
        body
    ):
        raise EngineError(f"{path}: {name} does not have the bytes that its shape needs")
    return StoredTensor(dtype=dtype, shape=shape, data=body[start:end])


def check_complete(folder: Path) -> None:
    """Raise EngineError, naming the file, for a shard that the index names and is missing, or a cut one.

    Reads headers only.
    """
    index = folder / "model.safetensors.index.json"
    with boundary(EngineError, f"read {index}"):
        named = orjson.loads(index.read_bytes())["weight_map"] if index.exists() else {}
    files = sorted(folder.glob("*.safetensors"))
    present = {file.name for file in files}
    if missing := sorted({*named.values()} - present):
        raise EngineError(
            f"{folder / missing[0]} is missing, which {index.name} names"
            f" ({len(missing)} of {len({*named.values()})} files): download it again"
        )
    for file in files:
        try:
            raw, start = _header(file)
            end = max((entry["data_offsets"][1] for name, entry in raw.items() if name != _NOTES), default=0)
        except (EngineError, KeyError, TypeError) as error:
            raise EngineError(f"{file} is damaged or cut off: download it again") from error
        if (size := file.stat().st_size) != start + end:
            raise EngineError(
                f"{file} has {size:,} bytes where its header needs {start + end:,}: download it again"
            )


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of every safetensors file of a model folder; raise EngineError."""
    with boundary(EngineError, f"read weights in {folder}"):
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no safetensors file")
    found: dict[str, StoredTensor] = {}
    for path in files:
        held = read_tensors(path)
        twice = found.keys() & held.keys()
        if twice:
            raise EngineError(f"{folder} holds {min(twice)} in two files")
        found |= held
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Type, shape and size of a tensor to be written."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], notes: Mapping[str, str] | None = None
) -> int:
    """Write one file, tensors in name order; its size in bytes. Raises EngineError."""
    specs = {
        name: TensorSpec(dtype=tensor.dtype, shape=tensor.shape, nbytes=len(tensor.data))
        for name, tensor in tensors.items()
    }
    with boundary(EngineError, f"write weights {path}"):
        return write_stream(path, specs, lambda name: tensors[name].data, notes)


def write_stream(
    path: Path,
    specs: Mapping[str, TensorSpec],
    data_of: Callable[[str], Bytes],
    notes: Mapping[str, str] | None = None,
    written: Callable[[Any], None] = lambda data: None,
) -> int:
    """Write one file, asking for one tensor's bytes at a time, in name order; return its size in bytes.

    written: called with every piece of the file in order. Raises OSError.
    """
    head: dict[str, object] = {_NOTES: {"format": "pt", **(notes or {})}}
    at = 0
    for name, spec in sorted(specs.items()):
        offsets = [at, at + spec.nbytes]
        head[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.nbytes
    header = orjson.dumps(head)
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        pieces: Iterable[Any] = (data_of(name).data for name in sorted(specs))
        for piece in chain([len(header).to_bytes(8, "little") + header], pieces):
            file.write(piece)
            written(piece)
    return 8 + len(header) + at


def digest(parts: Iterable[Bytes]) -> str:
    """Hex SHA-256 over the parts one after the other."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.data)
    return total.hexdigest()


def sums_of(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Sum of each tensor, in name order."""
    names = sorted(tensors)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest([tensors[name].data]), names), strict=True))


def total(sums: Mapping[str, str]) -> str:
    """One hex digest over names and sums, in name order."""
    return hashlib.sha256("".join(f"{name}\0{sums[name]}\0" for name in sorted(sums)).encode()).hexdigest()


def write_manifest(folder: Path, version: int, sums: Mapping[str, str]) -> Manifest:
    made = Manifest(version=version, checksum=total(sums), tensors=sums)
    body = {"schema_version": SCHEMA, "version": version, "checksum": made.checksum, "tensors": dict(sums)}
    with boundary(EngineError, f"write {folder / MANIFEST}"):
        (folder / MANIFEST).write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    return made


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest, None for an unpublished folder; raise EngineError for a damaged one."""
    path = folder / MANIFEST
    with boundary(EngineError, f"read {path}"):
        if not path.exists():
            return None
        raw = orjson.loads(path.read_bytes())
    try:
        found = Manifest(version=raw["version"], checksum=raw["checksum"], tensors=dict(raw["tensors"]))
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{path} is damaged: {error!r}") from error
    if found.checksum != total(found.tensors):
        raise EngineError(f"{path}: the checksum is not that of its tensors")
    return found


def check_manifest(folder: Path, manifest: Manifest, sums: Mapping[str, str]) -> None:
    """Raise EngineError, naming a tensor, unless the files are those that were published."""
    for name in sorted(manifest.tensors.keys() | sums.keys()):
        if manifest.tensors.get(name) != sums.get(name):
            why = "is missing" if name not in sums else "has not the checksum it was published with"
            raise EngineError(f"{folder}: {name} {why if name in manifest.tensors else 'was not published'}")


ASSETS = (
    "tokenizer*", "special_tokens_map*", "added_tokens*", "vocab*", "merges*", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "*.jinja", "generation_config*", "*processor_config*",
    "insitu_renderer.json", "*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files of a model folder besides config.json and weights."""


def model_assets(folder: Path) -> list[Path]:
    """Return the files of a model folder that are copied when its weights are replaced."""
    return sorted({path for pattern in ASSETS for path in folder.glob(pattern) if path.is_file()})
