"""Helpers for model files: error conversion of the safetensors library, assets, file modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from insitu.errors import InsituError, boundary


@contextmanager
def model_files(kind: type[InsituError], doing: str) -> Iterator[None]:
    """Convert errors of reading or writing safetensors, like `errors.boundary`."""
    with boundary(kind, doing):
        try:
            yield
        except SafetensorError as error:
            raise OSError(str(error)) from error


ASSETS = (
    "tokenizer*", "special_tokens_map*", "added_tokens*", "vocab*", "merges*", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "*.jinja", "generation_config*", "*processor_config*",
    "insitu_renderer.json", "*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files of a model folder besides config.json and weights."""


def model_assets(folder: Path) -> list[Path]:
    """Return the files of a model folder that are copied when its weights are replaced."""
    return sorted({path for pattern in ASSETS for path in folder.glob(pattern) if path.is_file()})


def share(folder: Path) -> None:
    """Give every file below `folder` default permissions: a server may run as another user."""
    made = folder / ".mode"
    made.touch()
    mode = made.stat().st_mode & 0o777
    made.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
