"""The edge to model files: the safetensors library fails with an error of its own, also of a full disk.

Callers: embedded_model, the trainer's policies and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from whet.errors import WhetError, boundary


@contextmanager
def model_files(kind: type[WhetError], doing: str) -> Iterator[None]:
    """As `errors.boundary`, for what reads or writes safetensors."""
    with boundary(kind, doing):
        try:
            yield
        except SafetensorError as error:
            raise OSError(str(error)) from error
