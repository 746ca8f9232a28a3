"""Offloads tensors saved for the backward pass to host memory.

On CUDA copies run on their own stream: to pinned memory when a tensor is saved, back one tensor ahead of the
backward pass, which unpacks in reverse order. On a CPU they are plain copies, for tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 26
"""Bytes of one piece of pinned memory. The allocator rounds to powers of two: one piece per tensor could take
twice its size."""


class _OffloadedTensor:
    __slots__ = ("back", "before", "dtype", "pieces", "ready", "shape")

    def __init__(self, pieces: list[Tensor], like: Tensor, before: _OffloadedTensor | None) -> None:
        self.pieces, self.before = pieces, before
        self.shape, self.dtype = like.shape, like.dtype
        self.back: Tensor | None = None
        """The copy on the device."""
        self.ready: torch.cuda.Event | None = None


class Offload:
    """Offloads what is saved for the backward pass within `hooks()`; one per policy and device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last: _OffloadedTensor | None = None
        self.bytes = 0
        """Sum over all tensors offloaded so far."""

    def begin(self) -> None:
        """Start a forward: free what an earlier one saved and did not use."""
        self._last = None

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which floating-point tensors that autograd saves are offloaded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _OffloadedTensor | Tensor:
        if tensor.device.type != self._device.type or not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        self.bytes += tensor.nbytes
        if self._stream is None:
            self._last = _OffloadedTensor([] if tensor.is_meta else [tensor.clone()], tensor, self._last)
            return self._last
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pieces = []
        with torch.cuda.stream(self._stream):
            for piece in torch.split(tensor.flatten(), PIECE // tensor.element_size()):
                pieces.append(torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True))
                pieces[-1].copy_(piece, non_blocking=True)
        # the allocator must not reuse the memory before the copy has read it
        tensor.record_stream(self._stream)
        self._last = _OffloadedTensor(pieces, tensor, self._last)
        return self._last

    def _unpack(self, saved: _OffloadedTensor | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        back = self._fetch(saved)
        if saved.before is not None:
            self._fetch(saved.before)
        if saved.ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(saved.ready)
            back.record_stream(current)
        saved.back = saved.before = None
        if self._last is saved:
            self._last = None
        return back

    def _fetch(self, saved: _OffloadedTensor) -> Tensor:
        """Start the copy back, once."""
        if saved.back is not None:
            return saved.back
        if self._stream is None:
            saved.back = saved.pieces[0] if saved.pieces else self._empty(saved)
            return saved.back
        with torch.cuda.stream(self._stream):
            saved.back = self._empty(saved)
            at = 0
            for piece in saved.pieces:
                saved.back.view(-1)[at : at + len(piece)].copy_(piece, non_blocking=True)
                at += len(piece)
            saved.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            saved.ready.record(self._stream)
            return saved.back

    def _empty(self, saved: _OffloadedTensor) -> Tensor:
        return torch.empty(saved.shape, dtype=saved.dtype, device=self._device)
