"""Model files: the content of a folder, written tensor by tensor; error conversion; file modes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from insitu.engines.safetensors_file import TensorSpec, check_complete, digest, write_stream
from insitu.errors import EngineError, InsituError, boundary

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of types in a safetensors file."""
_THREADS, _AHEAD = 4, 8
"""Threads that hash tensors, and tensors that may wait for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """The content of a model folder: weights and configuration."""

    name: str
    """Name of the file with the tensors."""
    tensors: Mapping[str, Tensor]
    """Not copied, on any device."""
    texts: Mapping[str, str]
    """Further files."""

    def copied(self) -> StoredModel:
        """Return it with tensors of its own in host memory."""
        return replace(self, tensors=copied(self.tensors))

    def write(self, folder: Path) -> str:
        """Write all files; return the SHA-256 of the one with tensors. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return write_hashed(folder / self.name, self.tensors)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def write_hashed(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file and return its SHA-256, computed from what is written. Raises OSError."""
    total = hashlib.sha256()
    write_stream(path, _specs(tensors, None), lambda name: _data(tensors[name], None), written=total.update)
    return total.hexdigest()


def write_summed(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, str]:
    """Write a safetensors file, one tensor at a time in host memory; return each tensor's SHA-256.

    dtype: type of floating-point tensors in the file; None = their own. Raises OSError.
    """
    sums: dict[str, Future[str]] = {}
    pending: deque[Future[str]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:

        def data_of(name: str) -> Any:
            data = _data(tensors[name], dtype)
            sums[name] = pool.submit(digest, [data])
            pending.append(sums[name])
            if len(pending) > _AHEAD:
                pending.popleft().result()
            return data

        write_stream(path, _specs(tensors, dtype), data_of)
    return {name: found.result() for name, found in sums.items()}


def digests(tensors: Mapping[str, Tensor], data: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each `data(tensor)`, in name order."""
    names = sorted(tensors)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: digest([_data(data(tensors[name].detach()), None)]), names)
        return dict(zip(names, found, strict=True))


def _type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _specs(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            dtype=CODES[_type(tensor, dtype)],
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * _type(tensor, dtype).itemsize,
        )
        for name, tensor in tensors.items()
    }


def _data(tensor: Tensor, dtype: torch.dtype | None) -> Any:
    """Return the bytes of a tensor as a numpy array, cast on its own device."""
    held = tensor.detach().to(_type(tensor, dtype)).cpu().contiguous()
    return held.reshape(-1).view(torch.uint8).numpy()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder's safetensors files, one or several. Raises EngineError."""
    check_complete(folder)
    with model_files(EngineError, f"load model {folder}"):
        whole = folder / "model.safetensors"
        files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError("no *.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@contextmanager
def model_files(kind: type[InsituError], doing: str) -> Iterator[None]:
    """Convert errors of reading or writing safetensors, like `errors.boundary`."""
    with boundary(kind, doing):
        try:
            yield
        except SafetensorError as error:
            raise OSError(str(error)) from error


def share(folder: Path) -> None:
    """Give every file below `folder` default permissions: a server may run as another user."""
    made = folder / ".mode"
    made.touch()
    mode = made.stat().st_mode & 0o777
    made.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
