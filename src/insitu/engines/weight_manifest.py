"""A published model folder: its tensors, their checksums, and a check that they stay unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from insitu.engines.safetensors_file import (
    StoredTensor,
    check_manifest,
    digest,
    read_folder,
    read_manifest,
    sums_of,
    total,
)
from insitu.engines.weight_mapping import WeightMapping
from insitu.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFolder:
    """Contents of a folder when it was inspected."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    sums: Mapping[str, str]

    @property
    def checksum(self) -> str:
        return total(self.sums)

    def expected(self, mapping: WeightMapping) -> dict[str, str]:
        """Return the checksum of each parameter of a server with these bytes."""
        return {
            name: self.sums[parts[0]] if len(parts) == 1 else digest([self.tensors[p].data for p in parts])
            for name, parts in mapping.sources.items()
        }

    def check_unchanged(self) -> None:
        """Raise EngineError when the files are no longer those that were inspected."""
        if sums_of(read_folder(self.folder)) != self.sums:
            raise EngineError(f"{self.folder} was written to while the engine loaded it")


def inspect(folder: Path, version: int) -> PublishedFolder:
    """Read and digest a folder. Raises EngineError when it is damaged or was published as another version."""
    tensors = read_folder(folder)
    sums = sums_of(tensors)
    manifest = read_manifest(folder)
    if manifest is not None:
        check_manifest(folder, manifest, sums)
        if manifest.version != version:
            raise EngineError(f"{folder} holds version {manifest.version}, not version {version}")
    return PublishedFolder(folder=folder, tensors=tensors, sums=sums)
