"""The files of a model folder as one digest: what an engine was told to load, before and after it did."""

from __future__ import annotations

import hashlib
from pathlib import Path

from whet.errors import EngineError, boundary


def folder_digest(folder: Path) -> str:
    """Hex SHA-256 over name and bytes of every safetensors file, in name order. Raises EngineError."""
    with boundary(EngineError, f"read weights in {folder}"):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{folder} holds no safetensors file")
        total = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                total.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
