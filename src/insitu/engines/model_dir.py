"""Weight files of a model folder as one digest, and its config."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from insitu.errors import EngineError, boundary


def folder_digest(folder: Path) -> str:
    """Return the hex SHA-256 over name and bytes of every safetensors file, in name order.

    Raises EngineError.
    """
    with boundary(EngineError, f"read weights in {folder}"):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{folder} contains no safetensors file")
        total = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                total.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def ties_embeddings(folder: Path) -> bool:
    """Return whether the output head is the embedding matrix; False for a folder without a config."""
    path = folder / "config.json"
    with boundary(EngineError, f"read {path}"):
        config = orjson.loads(path.read_bytes()) if path.exists() else {}
    return bool(isinstance(config, dict) and config.get("tie_word_embeddings"))
